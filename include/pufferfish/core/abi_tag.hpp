// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the part of the ABI namespace's name that encodes the compiler flags that affect code:
/// instruction-set extensions, fast-math, language features. The linker keeps one of several functions of the
/// same name. Objects compiled with different flags must therefore not share function names: the copy that is
/// kept could use an instruction that the processor of another object lacks.
///
/// The name is a level, followed by one character for every extension that the level does not imply. On
/// x86-64 the levels are base, x2, x3 and x4, as in the psABI (x4: AVX-512). Extensions that compilers use
/// only if a program names them (AES, SHA, AMX, random numbers) are left out.

// PUFFERFISH_DETAIL_IF(macro, token): expands to the token if the macro is defined as 1, else to nothing.
// A macro that is 1 makes ONE_1, whose comma shifts the token to second place; any other value makes an
// unknown name, and the empty argument after it is second.
#define PUFFERFISH_DETAIL_ONE_1 ~,
#define PUFFERFISH_DETAIL_SECOND(first, second, ...) second
#define PUFFERFISH_DETAIL_EXPAND_SECOND(...) PUFFERFISH_DETAIL_SECOND(__VA_ARGS__)
#define PUFFERFISH_DETAIL_IF2(value, token) \
  PUFFERFISH_DETAIL_EXPAND_SECOND(PUFFERFISH_DETAIL_ONE_##value token, , ~)
#define PUFFERFISH_DETAIL_IF(macro, token) PUFFERFISH_DETAIL_IF2(macro, token)
// Joins eight tokens to one name. The outer macro expands the arguments first.
#define PUFFERFISH_DETAIL_JOIN8_(a, b, c, d, e, f, g, h) a##b##c##d##e##f##g##h
#define PUFFERFISH_DETAIL_JOIN8(a, b, c, d, e, f, g, h) PUFFERFISH_DETAIL_JOIN8_(a, b, c, d, e, f, g, h)

#if defined(__x86_64__) || defined(__i386__) || defined(_M_X64) || defined(_M_IX86)

// Extensions that each level adds to the level below.
#define PUFFERFISH_DETAIL_IN_X2                                                                     \
  PUFFERFISH_DETAIL_JOIN8(PUFFERFISH_DETAIL_IF(__SSE3__, a), PUFFERFISH_DETAIL_IF(__SSSE3__, b),    \
                          PUFFERFISH_DETAIL_IF(__SSE4_1__, c), PUFFERFISH_DETAIL_IF(__SSE4_2__, d), \
                          PUFFERFISH_DETAIL_IF(__POPCNT__, e), , , )
#define PUFFERFISH_DETAIL_IN_X3                                                                \
  PUFFERFISH_DETAIL_JOIN8(PUFFERFISH_DETAIL_IF(__AVX__, f), PUFFERFISH_DETAIL_IF(__AVX2__, g), \
                          PUFFERFISH_DETAIL_IF(__BMI__, h), PUFFERFISH_DETAIL_IF(__BMI2__, i), \
                          PUFFERFISH_DETAIL_IF(__F16C__, j), PUFFERFISH_DETAIL_IF(__FMA__, k), \
                          PUFFERFISH_DETAIL_IF(__LZCNT__, l), PUFFERFISH_DETAIL_IF(__MOVBE__, m))
#define PUFFERFISH_DETAIL_IN_X4                                                                         \
  PUFFERFISH_DETAIL_JOIN8(PUFFERFISH_DETAIL_IF(__AVX512F__, n), PUFFERFISH_DETAIL_IF(__AVX512BW__, o),  \
                          PUFFERFISH_DETAIL_IF(__AVX512CD__, p), PUFFERFISH_DETAIL_IF(__AVX512DQ__, q), \
                          PUFFERFISH_DETAIL_IF(__AVX512VL__, r), , , )
// Extensions that belong to no level.
#define PUFFERFISH_DETAIL_EXTENSIONS                                                                 \
  PUFFERFISH_DETAIL_JOIN8(                                                                           \
      PUFFERFISH_DETAIL_JOIN8(                                                                       \
          PUFFERFISH_DETAIL_IF(__AVX512VNNI__, A), PUFFERFISH_DETAIL_IF(__AVX512BF16__, B),          \
          PUFFERFISH_DETAIL_IF(__AVX512FP16__, C), PUFFERFISH_DETAIL_IF(__AVX512IFMA__, D),          \
          PUFFERFISH_DETAIL_IF(__AVX512VBMI__, E), PUFFERFISH_DETAIL_IF(__AVX512VBMI2__, F),         \
          PUFFERFISH_DETAIL_IF(__AVX512BITALG__, G), PUFFERFISH_DETAIL_IF(__AVX512VPOPCNTDQ__, H)),  \
      PUFFERFISH_DETAIL_JOIN8(                                                                       \
          PUFFERFISH_DETAIL_IF(__AVX512ER__, I), PUFFERFISH_DETAIL_IF(__AVX512PF__, J),              \
          PUFFERFISH_DETAIL_IF(__AVX5124FMAPS__, K), PUFFERFISH_DETAIL_IF(__AVX5124VNNIW__, L),      \
          PUFFERFISH_DETAIL_IF(__AVX512VP2INTERSECT__, M), PUFFERFISH_DETAIL_IF(__AVX10_1__, N),     \
          PUFFERFISH_DETAIL_IF(__AVX10_2__, O), PUFFERFISH_DETAIL_IF(__GFNI__, P)),                  \
      PUFFERFISH_DETAIL_JOIN8(                                                                       \
          PUFFERFISH_DETAIL_IF(__AVXVNNI__, Q), PUFFERFISH_DETAIL_IF(__AVXVNNIINT8__, R),            \
          PUFFERFISH_DETAIL_IF(__AVXVNNIINT16__, S), PUFFERFISH_DETAIL_IF(__AVXIFMA__, T),           \
          PUFFERFISH_DETAIL_IF(__AVXNECONVERT__, U), PUFFERFISH_DETAIL_IF(__APX_F__, V),             \
          PUFFERFISH_DETAIL_IF(__CMPCCXADD__, W), PUFFERFISH_DETAIL_IF(__ADX__, X)),                 \
      PUFFERFISH_DETAIL_JOIN8(PUFFERFISH_DETAIL_IF(__SSE4A__, Y), PUFFERFISH_DETAIL_IF(__FMA4__, Z), \
                              PUFFERFISH_DETAIL_IF(__XOP__, s), PUFFERFISH_DETAIL_IF(__TBM__, t),    \
                              PUFFERFISH_DETAIL_IF(__PRFCHW__, u), , , ),                            \
      , , , )

// Which levels are complete. A level counts only if all of its extensions and those of the levels below are
// enabled.
#if defined(__SSE3__) && defined(__SSSE3__) && defined(__SSE4_1__) && defined(__SSE4_2__) && \
    defined(__POPCNT__)
#define PUFFERFISH_DETAIL_HAS_X2 1
#else
#define PUFFERFISH_DETAIL_HAS_X2 0
#endif
#if PUFFERFISH_DETAIL_HAS_X2 && defined(__AVX2__) && defined(__BMI__) && defined(__BMI2__) && \
    defined(__F16C__) && defined(__FMA__) && defined(__LZCNT__) && defined(__MOVBE__)
#define PUFFERFISH_DETAIL_HAS_X3 1
#else
#define PUFFERFISH_DETAIL_HAS_X3 0
#endif

#if PUFFERFISH_DETAIL_HAS_X3 && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512CD__) && \
    defined(__AVX512DQ__) && defined(__AVX512VL__)
#define PUFFERFISH_DETAIL_ISA PUFFERFISH_DETAIL_JOIN8(x4, PUFFERFISH_DETAIL_EXTENSIONS, , , , , , )
#elif PUFFERFISH_DETAIL_HAS_X3
#define PUFFERFISH_DETAIL_ISA \
  PUFFERFISH_DETAIL_JOIN8(x3, PUFFERFISH_DETAIL_IN_X4, PUFFERFISH_DETAIL_EXTENSIONS, , , , , )
#elif PUFFERFISH_DETAIL_HAS_X2
#define PUFFERFISH_DETAIL_ISA                                                   \
  PUFFERFISH_DETAIL_JOIN8(x2, PUFFERFISH_DETAIL_IN_X3, PUFFERFISH_DETAIL_IN_X4, \
                          PUFFERFISH_DETAIL_EXTENSIONS, , , , )
#else
#if defined(__i386__) && !defined(__SSE2_MATH__)
#define PUFFERFISH_DETAIL_LOWEST x87
#else
#define PUFFERFISH_DETAIL_LOWEST base
#endif
#define PUFFERFISH_DETAIL_ISA                                                                         \
  PUFFERFISH_DETAIL_JOIN8(PUFFERFISH_DETAIL_LOWEST, PUFFERFISH_DETAIL_IN_X2, PUFFERFISH_DETAIL_IN_X3, \
                          PUFFERFISH_DETAIL_IN_X4, PUFFERFISH_DETAIL_EXTENSIONS, , , )
#endif

#elif defined(__aarch64__) || defined(__arm__) || defined(_M_ARM64)

#define PUFFERFISH_DETAIL_ISA                                                                               \
  PUFFERFISH_DETAIL_JOIN8(                                                                                  \
      base,                                                                                                 \
      PUFFERFISH_DETAIL_JOIN8(                                                                              \
          PUFFERFISH_DETAIL_IF(__ARM_NEON, a), PUFFERFISH_DETAIL_IF(__ARM_FEATURE_FMA, b),                  \
          PUFFERFISH_DETAIL_IF(__ARM_FEATURE_ATOMICS, c), PUFFERFISH_DETAIL_IF(__ARM_FEATURE_QRDMX, d),     \
          PUFFERFISH_DETAIL_IF(__ARM_FEATURE_FP16_SCALAR_ARITHMETIC, e),                                    \
          PUFFERFISH_DETAIL_IF(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC, f),                                    \
          PUFFERFISH_DETAIL_IF(__ARM_FEATURE_FP16_FML, g), PUFFERFISH_DETAIL_IF(__ARM_FEATURE_DOTPROD, h)), \
      PUFFERFISH_DETAIL_JOIN8(                                                                              \
          PUFFERFISH_DETAIL_IF(__ARM_FEATURE_COMPLEX, i), PUFFERFISH_DETAIL_IF(__ARM_FEATURE_JCVT, j),      \
          PUFFERFISH_DETAIL_IF(__ARM_FEATURE_FRINT, k), PUFFERFISH_DETAIL_IF(__ARM_FEATURE_BF16, l),        \
          PUFFERFISH_DETAIL_IF(__ARM_FEATURE_MATMUL_INT8, m), PUFFERFISH_DETAIL_IF(__ARM_FEATURE_SVE, n),   \
          PUFFERFISH_DETAIL_IF(__ARM_FEATURE_SVE2, o), PUFFERFISH_DETAIL_IF(__ARM_FEATURE_MOPS, p)),        \
      PUFFERFISH_DETAIL_JOIN8(PUFFERFISH_DETAIL_IF(__ARM_FEATURE_RCPC, q),                                  \
                              PUFFERFISH_DETAIL_IF(__ARM_FEATURE_CSSC, r),                                  \
                              PUFFERFISH_DETAIL_IF(__ARM_FEATURE_SVE2p1, s),                                \
                              PUFFERFISH_DETAIL_IF(__ARM_FEATURE_LSE128, t), , , , ),                       \
      PUFFERFISH_DETAIL_VECTOR_BITS, , , )
// Set by -msve-vector-bits: code for one fixed vector length.
#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS != 0
#define PUFFERFISH_DETAIL_VECTOR_BITS __ARM_FEATURE_SVE_BITS
#else
#define PUFFERFISH_DETAIL_VECTOR_BITS
#endif

#elif defined(__powerpc__)

#define PUFFERFISH_DETAIL_ISA                                                                           \
  PUFFERFISH_DETAIL_JOIN8(base, PUFFERFISH_DETAIL_IF(__ALTIVEC__, a), PUFFERFISH_DETAIL_IF(__VSX__, b), \
                          PUFFERFISH_DETAIL_IF(_ARCH_PWR8, c), PUFFERFISH_DETAIL_IF(_ARCH_PWR9, d),     \
                          PUFFERFISH_DETAIL_IF(_ARCH_PWR10, e), PUFFERFISH_DETAIL_IF(_ARCH_PWR11, f),   \
                          PUFFERFISH_DETAIL_IF(__MMA__, g))

#elif defined(__s390__)

#define PUFFERFISH_DETAIL_ISA PUFFERFISH_DETAIL_JOIN8(z, __ARCH__, PUFFERFISH_DETAIL_IF(__VX__, v), , , , , )

#elif defined(__riscv)

// These macros are defined as the extensions' versions, not as 1.
#if defined(__riscv_v)
#define PUFFERFISH_DETAIL_RISCV_V v
#else
#define PUFFERFISH_DETAIL_RISCV_V
#endif
#if defined(__riscv_zba) && defined(__riscv_zbb)
#define PUFFERFISH_DETAIL_RISCV_B b
#else
#define PUFFERFISH_DETAIL_RISCV_B
#endif
#define PUFFERFISH_DETAIL_ISA \
  PUFFERFISH_DETAIL_JOIN8(base, PUFFERFISH_DETAIL_RISCV_V, PUFFERFISH_DETAIL_RISCV_B, , , , , )

#elif defined(__loongarch__)

#define PUFFERFISH_DETAIL_ISA                                            \
  PUFFERFISH_DETAIL_JOIN8(base, PUFFERFISH_DETAIL_IF(__loongarch_sx, a), \
                          PUFFERFISH_DETAIL_IF(__loongarch_asx, b), , , , , )

#else
#define PUFFERFISH_DETAIL_ISA base
#endif

// Flags for arithmetic that deviates from IEC 60559: such code may lack tests for infinity, for example.
#if defined(__FAST_MATH__)
#define PUFFERFISH_DETAIL_MATH _fast
#else
#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ != 0
#define PUFFERFISH_DETAIL_FINITE _finite
#else
#define PUFFERFISH_DETAIL_FINITE
#endif
#define PUFFERFISH_DETAIL_MATH                                                                      \
  PUFFERFISH_DETAIL_JOIN8(PUFFERFISH_DETAIL_FINITE, PUFFERFISH_DETAIL_IF(__ASSOCIATIVE_MATH__, _a), \
                          PUFFERFISH_DETAIL_IF(__RECIPROCAL_MATH__, _r),                            \
                          PUFFERFISH_DETAIL_IF(__NO_SIGNED_ZEROS__, _z), , , , )
#endif

// Threads that contexts use (core/parallel.hpp): OpenMP's if the unit is compiled with OpenMP.
#if defined(_OPENMP)
#define PUFFERFISH_DETAIL_THREADS _omp
#else
#define PUFFERFISH_DETAIL_THREADS
#endif
// Modes of the library itself: without exceptions, without RTTI, and with a PUFFERFISH_THROW of the program.
#if PUFFERFISH_EXCEPTIONS
#define PUFFERFISH_DETAIL_NO_EXCEPTIONS
#else
#define PUFFERFISH_DETAIL_NO_EXCEPTIONS _noexcept
#endif
#if PUFFERFISH_RTTI
#define PUFFERFISH_DETAIL_NO_RTTI
#else
#define PUFFERFISH_DETAIL_NO_RTTI _nortti
#endif
#if defined(PUFFERFISH_THROW)
#define PUFFERFISH_DETAIL_OWN_THROW _throw
#else
#define PUFFERFISH_DETAIL_OWN_THROW
#endif

/// For example x3 or x4ABD_noexcept_omp.
#define PUFFERFISH_DETAIL_FLAGS                                                                              \
  PUFFERFISH_DETAIL_JOIN8(PUFFERFISH_DETAIL_ISA, PUFFERFISH_DETAIL_MATH, PUFFERFISH_DETAIL_NO_EXCEPTIONS,    \
                          PUFFERFISH_DETAIL_NO_RTTI, PUFFERFISH_DETAIL_OWN_THROW, PUFFERFISH_DETAIL_THREADS, \
                          , )
