// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The base of every other header: the language check, the ABI namespace and the few macros of the library.
/// No macro of the library changes a type. Users may define two:
///   PUFFERFISH_ASSERT_LEVEL  0 off, 1 light (default: argument checks), 2 full (every element access),
///   PUFFERFISH_THROW(e)      how an exception leaves the library (default: `throw e`; with -fno-exceptions,
///                            its text is printed and the program aborts). It must not return.

#if defined(_MSVC_LANG)
#define PUFFERFISH_CPLUSPLUS _MSVC_LANG
#else
#define PUFFERFISH_CPLUSPLUS __cplusplus
#endif
#if PUFFERFISH_CPLUSPLUS < 202002L
#error "pufferfish needs C++20: add -std=c++20 (or newer) to the compiler's flags"
// Ends the compilation, so that nothing hides the error above.
#include <pufferfish/stopped_by_the_error_above>
#endif

#include <pufferfish/core/version.hpp>

#ifndef PUFFERFISH_ASSERT_LEVEL
#define PUFFERFISH_ASSERT_LEVEL 1
#endif
#if PUFFERFISH_ASSERT_LEVEL != 0 && PUFFERFISH_ASSERT_LEVEL != 1 && PUFFERFISH_ASSERT_LEVEL != 2
#error "PUFFERFISH_ASSERT_LEVEL must be 0 (off), 1 (light) or 2 (full)"
#endif

// Whether this translation unit has exceptions (off with -fno-exceptions) and RTTI (off with -fno-rtti).
#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
#define PUFFERFISH_EXCEPTIONS 1
#else
#define PUFFERFISH_EXCEPTIONS 0
#endif

#if defined(__cpp_rtti) || defined(_CPPRTTI)
#define PUFFERFISH_RTTI 1
#else
#define PUFFERFISH_RTTI 0
#endif

// Included before PUFFERFISH_THROW gets its default: the tag contains whether the user has defined the macro.
#include <pufferfish/core/abi_tag.hpp>

#ifndef PUFFERFISH_THROW
#if PUFFERFISH_EXCEPTIONS
#define PUFFERFISH_THROW(exception) throw exception
#else
#define PUFFERFISH_THROW(exception) ::pufferfish::detail::print_and_abort(exception)
#endif
#endif

// Macros for try, catch of one type and catch of everything. Without exceptions, the handlers are compiled
// but never run.
#if PUFFERFISH_EXCEPTIONS
#define PUFFERFISH_DETAIL_TRY try
#define PUFFERFISH_DETAIL_CATCH(type, name) catch (const type& name)
#define PUFFERFISH_DETAIL_CATCH_ALL catch (...)
#else
#define PUFFERFISH_DETAIL_TRY if (true)
#define PUFFERFISH_DETAIL_CATCH(type, name) \
  else if (const type& name = ::pufferfish::detail::not_caught<type>(); false)
#define PUFFERFISH_DETAIL_CATCH_ALL else
#endif

// Join the parts of the namespaces' names; the outer macros expand their arguments first.
#define PUFFERFISH_DETAIL_ABI3(major, minor, level, flags) v##major##_##minor##_a##level##_##flags
#define PUFFERFISH_DETAIL_ABI2(major, minor, level, flags) PUFFERFISH_DETAIL_ABI3(major, minor, level, flags)
#define PUFFERFISH_DETAIL_STABLE2(major, minor) v##major##_##minor
#define PUFFERFISH_DETAIL_STABLE1(major, minor) PUFFERFISH_DETAIL_STABLE2(major, minor)

/// Name of the inline namespace: version, assertion level and the compiler flags that affect code
/// (core/abi_tag.hpp). Objects built with different flags can be linked into one program, because they
/// have no symbol in common.
#define PUFFERFISH_ABI_NAMESPACE                                                                      \
  PUFFERFISH_DETAIL_ABI2(PUFFERFISH_VERSION_MAJOR, PUFFERFISH_VERSION_MINOR, PUFFERFISH_ASSERT_LEVEL, \
                         PUFFERFISH_DETAIL_FLAGS)
/// Opens the namespace of the library; every header has its code between these two macros.
#define PUFFERFISH_NAMESPACE_BEGIN \
  namespace pufferfish {           \
  inline namespace PUFFERFISH_ABI_NAMESPACE {
#define PUFFERFISH_NAMESPACE_END \
  }                              \
  }

/// Opens a namespace for types whose code does not depend on flags (exceptions). Such a type is the same in
/// the whole program, so a catch in one object handles a throw from an object built with other flags.
#define PUFFERFISH_STABLE_NAMESPACE_BEGIN \
  namespace pufferfish {                  \
  inline namespace PUFFERFISH_DETAIL_STABLE1(PUFFERFISH_VERSION_MAJOR, PUFFERFISH_VERSION_MINOR) {
#define PUFFERFISH_STABLE_NAMESPACE_END \
  }                                     \
  }

/// Marks functions that kernels of a device call, too.
#if defined(__CUDACC__)
#define PUFFERFISH_HOST_DEVICE __host__ __device__
#else
#define PUFFERFISH_HOST_DEVICE
#endif

/// Attributes of functions and pointers, empty for compilers without them: always inlined, not aliased, never
/// inlined.
#if defined(__GNUC__) || defined(__clang__)
#define PUFFERFISH_ALWAYS_INLINE inline __attribute__((always_inline))
#define PUFFERFISH_RESTRICT __restrict__
#define PUFFERFISH_NOINLINE __attribute__((noinline))
/// Attribute of functions that run rarely (before an exception, once per factorization): compiled for size,
/// never inlined.
#define PUFFERFISH_COLD __attribute__((cold, noinline))
#else
#define PUFFERFISH_ALWAYS_INLINE inline
#define PUFFERFISH_RESTRICT
#define PUFFERFISH_NOINLINE
#define PUFFERFISH_COLD
#endif

/// Written after the declarator of an overload that must not be called: the compiler's error at the call
/// contains `text`. Compilers without the attribute report a call of a deleted function.
#if defined(__has_attribute)
#if __has_attribute(unavailable) && !defined(__CUDACC__)
#define PUFFERFISH_UNAVAILABLE(text) __attribute__((unavailable("pufferfish: " text)))
#endif
#endif
#ifndef PUFFERFISH_UNAVAILABLE
#define PUFFERFISH_UNAVAILABLE(text) = delete
#endif
