// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `save_lottery`, `load_lottery`: lottery tickets in files, so that a search goes on after any level.

#include <map>
#include <string>
#include <vector>

#include <pufferfish/prune/lottery.hpp>
#include <pufferfish/train/checkpoint.hpp>
#include <pufferfish/train/rank_states.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

inline constexpr const char* lottery_fact = "lottery";  ///< name of the level and the rows in the checkpoint
inline constexpr const char* lottery_mask_state = "lottery.mask";  ///< name of the mask in the checkpoint

}  // namespace detail

/// Writes a lottery to a checkpoint: values and buffers at the rewind point (not masked), level, mask and
/// rows. `net` is a network of the search; its values do not matter. A program calls this function between
/// two levels; within a level training_run::save writes a separate checkpoint. `facts` and errors are those
/// of save_checkpoint. Local: one rank calls it. Needs memory for a second network.
///
///     save_lottery("level3.safetensors", net, tickets);
///     lottery<float> again = load_lottery("level3.safetensors", net);
///     again.rewind(...);                                              // the next level
template <class Root, class Device, class T = detail::stored_t<const model<Root, Device>>>
void save_lottery(const std::string& path, const model<Root, Device>& net, const lottery<T>& tickets,
                  std::map<std::string, std::string> facts = {}) {
  model<Root, Device> theta = net;
  theta.on_host([&](Root&) {
    std::size_t at = 0;
    for (const auto& entry : theta.store().parameters()) {
      for (T& value : entry.thing->values()) value = tickets.values()[at++];
    }
    at = 0;
    for (const auto& entry : theta.store().buffer_entries()) {
      for (T& value : entry.thing->values()) value = tickets.buffers()[at++];
    }
  });
  facts[detail::lottery_fact] = tickets.to_text();
  std::vector<T> numbers = mask_numbers<T>(*tickets.mask());
  const std::vector<named_state<T>> states{{detail::lottery_mask_state, numbers}};
  save_checkpoint(path, theta, states, facts);
}

/// Restores a search: sets `net` to theta_k, not masked, and returns the tickets at the stored level. The
/// next step is lottery::rewind. Throws io_error for a file that save_lottery has not written or that does
/// not fit `net`, and state_error if it was written with other options. Local: ranks read the file each.
template <class Root, class T = typename Root::value_type>
lottery<T> load_lottery(const std::string& path, model<Root, device::cpu>& net,
                        const lottery_options& options = {}) {
  const checkpoint_file file = open_checkpoint(path);
  const std::string& text = file.fact(detail::lottery_fact);
  std::vector<T> numbers(static_cast<std::size_t>(file.stored_size(detail::lottery_mask_state)));
  const std::vector<named_state<T>> states{{detail::lottery_mask_state, numbers}};
  file.restore(net, states);
  lottery<T> tickets(net.store(), options);
  tickets.restore(text, numbers, path);
  return tickets;
}

/// Reads a lottery that save_lottery has written, on all ranks of a communicator; rank 0 alone reads the file
/// and sends it to the others. Collective. If rank 0 throws an error (see the form above), the other ranks
/// throw state_error with its text.
template <class Root, class Comm, class T = typename Root::value_type>
lottery<T> load_lottery(const std::string& path, model<Root, device::cpu>& net,
                        const lottery_options& options, Comm& comm) {
  std::vector<T> numbers;
  const std::string text = detail::on_root(comm, [&] {
    const lottery<T> read = load_lottery(path, net, options);
    numbers = mask_numbers<T>(*read.mask());
    return read.to_text();
  });
  detail::broadcast_from(comm, 0, memory_of<device::cpu>::source(), net.store().values());
  detail::broadcast_from(comm, 0, memory_of<device::cpu>::source(), net.store().buffers());
  lottery<T> tickets(net.store(), options);
  numbers.resize(mask_numbers<T>(*tickets.mask()).size());
  comm.broadcast(std::span<T>(numbers), 0);
  tickets.restore(text, numbers, path);
  return tickets;
}

PUFFERFISH_NAMESPACE_END
