// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include "object.hpp"

TEST_CASE("objects with different flags live in one program") {
  const object_report a = light::run();
  const object_report b = full::run();
  CHECK(a.assert_level == 0);
  CHECK(b.assert_level == 2);
  CHECK(a.abi != b.abi);
  CHECK(a.checksum == doctest::Approx(b.checksum).epsilon(1e-6));
  CHECK(a.checksum > 0);
  CHECK(a.layers == doctest::Approx(b.layers).epsilon(1e-4));
  CHECK(a.layers > 0);
  CHECK(a.caught_own);
  CHECK(b.caught_own);
}

#if defined(WITH_OPENMP)
TEST_CASE("OpenMP's threads give the bits of our own, in a namespace of their own") {
  const object_report own = full::run();
  const object_report team = openmp::run();
  CHECK(own.abi != team.abi);
  CHECK(team.abi == own.abi + "_omp");
  CHECK(own.layers == team.layers);
  CHECK(team.caught_own);
}
#endif

TEST_CASE(
    "an object with separate kernels computes the bits of a header-only one, and shares its functions") {
  const object_report header_only = joined::run();
  const object_report with_kernels = separate::run();
  CHECK(with_kernels.abi == header_only.abi);
  CHECK(with_kernels.layers == header_only.layers);
  CHECK(with_kernels.checksum == header_only.checksum);
  CHECK(separate::catches(&light::throw_shape_error));
}

TEST_CASE("an exception thrown in one object is caught by its type in the other") {
  CHECK(light::catches(&full::throw_shape_error));
  CHECK(full::catches(&light::throw_shape_error));
  CHECK(openmp::catches(&light::throw_shape_error));
}
