// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Choice of the device that a program trains on: the CPU, or a GPU if it was built with CUDA.

#include <cstdlib>
#include <string>

#include <CLI/CLI.hpp>

#include <pufferfish/nn.hpp>
#if defined(PUFFERFISH_EXAMPLES_CUDA)
#include <pufferfish/gpu.hpp>
#endif

#include "session.hpp"

namespace examples {

struct device_choice {
  std::string device = "cpu";
  std::string precision = "fp32";
};

inline void add_device_options(CLI::App& app, device_choice& o) {
  app.add_option("--device", o.device, "Where to train; ranks share the devices of their host in turn")
      ->check(CLI::IsMember({"cpu", "gpu"}));
  app.add_option("--precision", o.precision,
                 "Of products; tf32: tensor cores take factors of 11 bits; bf16: of 8, and activations too")
      ->check(CLI::IsMember({"fp32", "tf32", "bf16"}));
}

#if defined(PUFFERFISH_EXAMPLES_CUDA)
/// The device of a rank: the ranks of a host are assigned to its devices in turn.
inline int device_of_rank(int rank) {
  // The rank among those of its host, if the launcher sets it.
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK"}) {
    if (const char* text = std::getenv(name)) rank = std::atoi(text);
  }
  return rank % pufferfish::gpu::device_count();
}
#endif

/// Makes the rank's device current and calls program(device, number) with the tag of the device and a number
/// of the type to compute in; returns the program's exit status. Throws value_error for a precision that the
/// CPU does not have, backend_error if no GPU can be used.
template <class Program>
int on_device(const device_choice& o, [[maybe_unused]] int rank, Program&& program) {
  if (o.device == "cpu") {
    if (o.precision == "bf16") return program(pufferfish::device::cpu{}, pufferfish::bfloat16{});
    if (o.precision != "fp32") {
      throw pufferfish::value_error("--precision " + o.precision + " needs --device gpu");
    }
    return program(pufferfish::device::cpu{}, float{});
  }
#if defined(PUFFERFISH_EXAMPLES_CUDA)
  if (pufferfish::gpu::device_count() == 0) {
    throw pufferfish::backend_error("--device gpu, but there is no CUDA device here");
  }
  pufferfish::gpu::use_device(device_of_rank(rank));
  if (o.precision == "bf16") return program(pufferfish::device::gpu{}, pufferfish::gpu::bf16{});
  return program(pufferfish::device::gpu{}, float{});
#else
  throw pufferfish::backend_error("--device gpu, but this program was built without CUDA");
#endif
}

/// Context options of a run: the number of threads, or the device of the rank.
inline pufferfish::context_options machine_of(pufferfish::device::cpu, const device_choice&, int threads,
                                              int) {
  pufferfish::context_options result;
  result.threads = threads;
  return result;
}
#if defined(PUFFERFISH_EXAMPLES_CUDA)
inline pufferfish::gpu::context_options machine_of(pufferfish::device::gpu, const device_choice& o, int,
                                                   int rank) {
  pufferfish::gpu::context_options result;
  result.device = device_of_rank(rank);
  if (o.precision == "tf32") result.math = pufferfish::gpu::math_mode::tf32;
  return result;
}
#endif

/// Copies a trained model to the CPU. `made`: a dense model of the same structure, with any values.
template <class Root, class Device, class Model>
Model on_host(const pufferfish::model<Root, Device>& net, Model made) {
  pufferfish::apply_factor_norms(made, pufferfish::factor_norm_layers(net));
  pufferfish::apply_ranks(made, pufferfish::low_rank_layers(net));
  pufferfish::copy_state(net, made);
  return made;
}

}  // namespace examples
