// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the mode in which a program compiles the library's large templates once.
///
/// The library is header-only by default. If PUFFERFISH_SEPARATE_KERNELS is defined for a translation unit,
/// the templates that are named by the macros below are declared there for float and double, and not
/// compiled. One source file of the program then includes <pufferfish/kernels.hpp>, which compiles them.
/// Objects of both modes can be linked into one program: both have the same functions, and the linker keeps
/// one of each.
///
/// A template that no macro names is compiled where it is used, in both modes. The macros therefore affect
/// compile time alone. They stand after the definition of a template, in its namespace:
///
/// \code
/// template <class T>
/// double gradient_norm(context<device::cpu>& ctx, std::span<const T> gradients) { ... }
/// PUFFERFISH_SEPARATE_FUNCTION(train, gradient_norm);
///
/// template <class T, class Device>
/// void add(context<Device>& ctx, std::span<const T> x, std::span<T> y) { ... }
/// PUFFERFISH_SEPARATE_OPERATION(dense, add);
/// \endcode
///
/// The first argument is the part of the kernels that compiles the template (kernels.hpp). A function must
/// not be overloaded where the macro stands. PUFFERFISH_SEPARATE_CLASS(part, name, arguments...) is for
/// class templates with further arguments after float or double.

#include <pufferfish/core/device.hpp>

// PUFFERFISH_DETAIL_EXTERN(PUFFERFISH_COMPILE_part) expands to nothing in the source file that compiles the
// part, else to `extern`.
#if defined(PUFFERFISH_COMPILE_PARTS)
#define PUFFERFISH_DETAIL_EXTERN(part) PUFFERFISH_DETAIL_EXTERN2(part)
#define PUFFERFISH_DETAIL_EXTERN2(value) \
  PUFFERFISH_DETAIL_EXTERN3(PUFFERFISH_DETAIL_EXTERN_##value, extern, ~)
#define PUFFERFISH_DETAIL_EXTERN3(...) PUFFERFISH_DETAIL_EXTERN4(__VA_ARGS__)
#define PUFFERFISH_DETAIL_EXTERN4(first, second, ...) second
#define PUFFERFISH_DETAIL_EXTERN_1 ~,
#elif defined(PUFFERFISH_COMPILE_KERNELS)
#define PUFFERFISH_DETAIL_EXTERN(part)
#elif defined(PUFFERFISH_SEPARATE_KERNELS)
#define PUFFERFISH_DETAIL_EXTERN(part) extern
#endif

#ifdef PUFFERFISH_DETAIL_EXTERN
#define PUFFERFISH_SEPARATE_FUNCTION(part, name)                                                  \
  PUFFERFISH_DETAIL_EXTERN(PUFFERFISH_COMPILE_##part) template decltype(name<float>) name<float>; \
  PUFFERFISH_DETAIL_EXTERN(PUFFERFISH_COMPILE_##part) template decltype(name<double>) name<double>
#define PUFFERFISH_SEPARATE_OPERATION(part, name)                       \
  PUFFERFISH_DETAIL_EXTERN(PUFFERFISH_COMPILE_##part)                   \
  template decltype(name<float, device::cpu>) name<float, device::cpu>; \
  PUFFERFISH_DETAIL_EXTERN(PUFFERFISH_COMPILE_##part)                   \
  template decltype(name<double, device::cpu>) name<double, device::cpu>
#define PUFFERFISH_SEPARATE_CLASS(part, name, ...)                                                           \
  PUFFERFISH_DETAIL_EXTERN(PUFFERFISH_COMPILE_##part) template class name<float __VA_OPT__(, ) __VA_ARGS__>; \
  PUFFERFISH_DETAIL_EXTERN(PUFFERFISH_COMPILE_##part) template class name<double __VA_OPT__(, ) __VA_ARGS__>

PUFFERFISH_NAMESPACE_BEGIN
/// A program without <pufferfish/kernels.hpp> is refused by the linker with this name. The name of the
/// namespace contains the compiler flags for which kernels are missing.
template <class T>
struct a_source_file_must_include_pufferfish_kernels_hpp {
  static const char compiled;
};
template <class T>
const char a_source_file_must_include_pufferfish_kernels_hpp<T>::compiled = 1;
PUFFERFISH_DETAIL_EXTERN(PUFFERFISH_COMPILE_linalg)
template struct a_source_file_must_include_pufferfish_kernels_hpp<void>;

namespace detail {
[[gnu::used, maybe_unused]] static const char* const separate_kernels =
    &a_source_file_must_include_pufferfish_kernels_hpp<void>::compiled;
}
PUFFERFISH_NAMESPACE_END

#else
#define PUFFERFISH_SEPARATE_FUNCTION(part, name) static_assert(true)
#define PUFFERFISH_SEPARATE_OPERATION(part, name) static_assert(true)
#define PUFFERFISH_SEPARATE_CLASS(part, name, ...) static_assert(true)
#endif
