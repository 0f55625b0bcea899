// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The instruction sets that kernels are compiled for, and checks of which ones this machine supports.
///
/// A kernel file (*.inc) is included once per target, between pragmas that switch the compiler to the target,
/// each time in a separate namespace (see for_each_target.inc). So a program compiled with plain -O2 still
/// runs AVX-512 kernels, selected at run time.

#include <initializer_list>

#include <pufferfish/core/config.hpp>
#include <pufferfish/core/scalar.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// From narrow to wide. `portable` is the instruction set of the compiler's flags. `neon` is the base of
/// every aarch64 processor: 32 registers of 16 bytes, with FMA. avx2 includes FMA. avx512 stands for the
/// extensions F, VL, BW and DQ.
enum class isa { portable, neon, avx2, avx512 };

/// All values of isa, in this order.
inline constexpr isa all_isas[] = {isa::portable, isa::neon, isa::avx2, isa::avx512};

/// Name of an instruction set: "portable", "neon", "avx2", "avx512".
constexpr const char* to_string(isa target) {
  return target == isa::avx512 ? "avx512"
         : target == isa::avx2 ? "avx2"
         : target == isa::neon ? "neon"
                               : "portable";
}

// Targets compiled in this translation unit: those at least as wide as the compiler's flags. If the flags
// contain AVX-512, it is the only target. On aarch64 NEON is the only target; SVE would be a second one,
// after `neon` in the enumeration, in for_each_target.inc and in PUFFERFISH_KERNEL.
#if defined(__aarch64__) && defined(__ARM_NEON) && (defined(__GNUC__) || defined(__clang__))
#define PUFFERFISH_KERNELS_NEON 1
#else
#define PUFFERFISH_KERNELS_NEON 0
#endif
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#define PUFFERFISH_KERNELS_AVX512 1
#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__FMA__)
#define PUFFERFISH_KERNELS_AVX2 0
#define PUFFERFISH_KERNELS_PORTABLE 0
#elif defined(__AVX2__) && defined(__FMA__)
#define PUFFERFISH_KERNELS_AVX2 1
#define PUFFERFISH_KERNELS_PORTABLE 0
#else
#define PUFFERFISH_KERNELS_AVX2 1
#define PUFFERFISH_KERNELS_PORTABLE 1
#endif
#else
#define PUFFERFISH_KERNELS_AVX512 0
#define PUFFERFISH_KERNELS_AVX2 0
#define PUFFERFISH_KERNELS_PORTABLE (1 - PUFFERFISH_KERNELS_NEON)
#endif

/// True if kernels for `target` are compiled into this unit and this machine can run them.
/// A unit that is compiled for one wide instruction set does not contain the narrower ones: isa::portable is
/// then false.
inline bool isa_available(isa target) {
  switch (target) {
    case isa::avx512:
#if PUFFERFISH_KERNELS_AVX512
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#else
      return false;
#endif
    case isa::avx2:
#if PUFFERFISH_KERNELS_AVX2
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
      return false;
#endif
    case isa::neon:  // NOLINT(bugprone-branch-clone): equal only where neither is compiled
      return PUFFERFISH_KERNELS_NEON != 0;
    case isa::portable:
      return PUFFERFISH_KERNELS_PORTABLE != 0;
  }
  return false;
}

/// The widest instruction set for which isa_available() is true.
/// If the unit is compiled for AVX-512 or NEON only, the machine is not asked.
inline isa widest_isa() {
#if PUFFERFISH_KERNELS_NEON
  return isa::neon;
#elif PUFFERFISH_KERNELS_AVX512 && !PUFFERFISH_KERNELS_AVX2
  return isa::avx512;
#else
  for (isa target : {isa::avx512, isa::avx2}) {
    if (isa_available(target)) return target;
  }
#if PUFFERFISH_KERNELS_PORTABLE
  return isa::portable;
#else
  return isa::avx2;
#endif
#endif
}

namespace detail {

/// Whether a x + b is rounded only once in the kernels that this machine uses. If so, elementwise kernels
/// compute the same bits in all targets.
inline bool fuses_multiply_add() {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return true;
#else
  return widest_isa() != isa::portable;
#endif
}

/// Name of the kernels that this machine uses, for results that depend on the order of summation: sums over
/// vectors depend on the number of lanes.
inline const char* kernel_name() {
  const isa target = widest_isa();
  if (target != isa::portable) return to_string(target);
  return fuses_multiply_add() ? "portable, fused multiply-add" : "portable";
}

}  // namespace detail

/// Pointer to a kernel's variant for an instruction set for which isa_available() is true:
/// PUFFERFISH_KERNEL(target, name, function), with the namespaces name_avx512, ... of for_each_target.inc.
#if PUFFERFISH_KERNELS_PORTABLE && PUFFERFISH_KERNELS_AVX512
#define PUFFERFISH_KERNEL(target, name, ...)                                                            \
  ::pufferfish::detail::choose_form((target), &name##_portable::__VA_ARGS__, &name##_avx2::__VA_ARGS__, \
                                    &name##_avx512::__VA_ARGS__)
#elif PUFFERFISH_KERNELS_AVX2
#define PUFFERFISH_KERNEL(target, name, ...) \
  ::pufferfish::detail::choose_form((target), &name##_avx2::__VA_ARGS__, &name##_avx512::__VA_ARGS__)
#elif PUFFERFISH_KERNELS_AVX512
#define PUFFERFISH_KERNEL(target, name, ...) \
  ::pufferfish::detail::choose_form((target), &name##_avx512::__VA_ARGS__)
#elif PUFFERFISH_KERNELS_NEON
#define PUFFERFISH_KERNEL(target, name, ...) \
  ::pufferfish::detail::choose_form((target), &name##_neon::__VA_ARGS__)
#else
#define PUFFERFISH_KERNEL(target, name, ...) \
  ::pufferfish::detail::choose_form((target), &name##_portable::__VA_ARGS__)
#endif

namespace detail {

template <class Form>
constexpr Form* choose_form(isa, Form* only) {
  return only;
}
template <class Form>
constexpr Form* choose_form(isa target, Form* avx2, Form* avx512) {
  return target == isa::avx512 ? avx512 : avx2;
}
template <class Form>
constexpr Form* choose_form(isa target, Form* portable, Form* avx2, Form* avx512) {
  return target == isa::avx512 ? avx512 : target == isa::avx2 ? avx2 : portable;
}

}  // namespace detail

PUFFERFISH_NAMESPACE_END
