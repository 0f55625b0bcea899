// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The arithmetic of Jacobi's method, for kernels and for tests on the host.

#include <cmath>

#include <pufferfish/gpu/kernels/launchers.hpp>

PUFFERFISH_KERNELS_BEGIN

/// A pair of different players in a round-robin schedule, first < second. Both are in 0 .. players - 1.
struct pairing {
  int first, second;
};

/// Pair `i` of round `round` in which `players` (an even number) form every pair once in players - 1 rounds
/// of players / 2 pairs: all but the last one are on a circle that turns by one place a round. 0 <= round <
/// players - 1, 0 <= i < players / 2.
PUFFERFISH_HOST_DEVICE inline pairing pairing_of(int players, int round, int i) {
  const int circle = players - 1;
  int a = circle, b = round;
  if (i > 0) {
    a = round + i < circle ? round + i : round + i - circle;
    b = round - i >= 0 ? round - i : round - i + circle;
  }
  return a < b ? pairing{a, b} : pairing{b, a};
}

/// x' = c x - s y, y' = s x + c y, applied to two rows and then to the same two columns of a symmetric
/// matrix: makes the element at their crossing zero, and their diagonal elements `first` and `second`.
template <class T>
struct plane_rotation {
  T c, s, first, second;
};

/// The rotation for [[pp, pq], [pq, qq]], pq not zero. The larger diagonal element becomes the first:
/// matrices whose eigenvalues differ by orders of magnitude then need half as many sweeps. Each new one is
/// the old one plus a correction, so that one much smaller than the other keeps its digits.
template <class T>
PUFFERFISH_HOST_DEVICE plane_rotation<T> diagonalizing_rotation(T pp, T pq, T qq) {
  using std::copysign, std::fabs, std::sqrt;
  constexpr T large = T(1e9);  // beyond, 1 + zeta^2 is zeta^2, which may overflow
  const T zeta = (qq - pp) / (2 * pq), size = fabs(zeta);
  const T t = copysign(size > large ? T(0.5) / size : 1 / (size + sqrt(1 + zeta * zeta)), zeta);
  const T c = 1 / sqrt(1 + t * t), s = c * t, shift = t * pq;
  const T first = pp - shift, second = qq + shift;
  return first < second ? plane_rotation<T>{s, -c, second, first} : plane_rotation<T>{c, s, first, second};
}

/// Whether the off-diagonal element pq counts as zero: relative to its diagonal elements, or
/// absolutely.
template <class T>
PUFFERFISH_HOST_DEVICE bool is_negligible(T pp, T pq, T qq, T tolerance, T floor) {
  using std::fabs, std::sqrt;
  const T size = fabs(pq);
  return !(size > floor && size > tolerance * sqrt(fabs(pp)) * sqrt(fabs(qq)));
}

PUFFERFISH_KERNELS_END
