// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Dynamic loss scaling over several ranks: a step that is not finite on one is skipped on all.
#include "parameters.hpp"

using namespace gpu_test;

// Every rank runs every case in the same order. No REQUIRE before a collective.

TEST_CASE("loss scaling over ranks: all skip together and have one scale, direct and captured") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (!comm.usable_from_threads()) return;
  check_scaled_training(comm, small_buckets());
}

TEST_CASE("loss scaling over ranks: a compressor gets gradients without the scale") {
  pf::mpi::communicator comm(MPI_COMM_WORLD);
  if (!comm.usable_from_threads()) return;
  pf::exchange_options options = small_buckets();
  options.nonfinite = pf::nonfinite_policy::skip;
  const pf::compression_options powersgd = pf::power_sgd_options{2, pf::error_feedback::local, 1.0, 3};
  const auto train = [&](bool captured, float scale) {
    return train_scaled(comm, options, captured, scale, unscaling::before_exchange, powersgd);
  };
  const scaled_training without = train(false, 1.0F);
  for (const bool captured : {false, true}) {
    const scaled_training got = train(captured, 1024.0F);
    CHECK(same_bits(got.values, without.values));
    CHECK(got.scale == 512.0F);
    CHECK(got.steps == training_steps - 1);
    CHECK(got.skipped_by_exchange == 1);
  }
}
