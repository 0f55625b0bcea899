// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Networks in files: `save_checkpoint`, and `open_checkpoint` with `checkpoint_file::restore`. The format is
/// safetensors, which Python reads, too. A file without optimizer state is a model file for inference.
///
///     save_checkpoint("run.safetensors", net, state, {{"epoch", "12"}});
///     checkpoint_file file = open_checkpoint("run.safetensors");
///     network<float> again = make_the_same_dense_model();
///     file.restore(again);

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <pufferfish/core/needs_exceptions.hpp>
#include <pufferfish/io/json_numbers.hpp>
#include <pufferfish/io/safetensors.hpp>
#include <pufferfish/models/file_names.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/switch/annealing.hpp>
#include <pufferfish/nn/switch/factor_norms.hpp>
#include <pufferfish/prune/slice/slice_channels.hpp>
#include <pufferfish/train/host_mirror.hpp>
#include <pufferfish/train/run/checkpoint_entries.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A flat array that a checkpoint stores in addition to the network, such as the optimizer's momentum
/// ("optimizer.momentum"), in the order of the network's arenas.
/// The span refers to memory of the caller, on the host.
template <class T>
struct named_state {
  std::string name;
  std::span<T> values;
};

/// An open checkpoint. It was checked as a safetensors file and a checkpoint, but not yet against a network.
/// The file's bytes are held in memory; the file itself is not open any more. References that members return
/// are valid as long as the object. Const members may be called by several threads at once.
class checkpoint_file {
 public:
  /// Path or name of the file, as given to open_checkpoint or parse_checkpoint.
  const std::string& name() const { return file_.name(); }

  /// Texts that the writer stored with the checkpoint, by name (`facts` of save_checkpoint).
  const std::map<std::string, std::string>& facts() const { return facts_; }
  /// The text that the writer stored under this name (see facts()). Throws io_error if there is none.
  const std::string& fact(const std::string& fact_name) const {
    const auto found = facts_.find(fact_name);
    if (found == facts_.end()) {
      detail::throw_error<io_error>({name(), ": the checkpoint says nothing about ",
                                     detail::quote_name(fact_name), " among its ", facts_.size(), " facts"});
    }
    return found->second;
  }

  /// Version of the library that wrote the file.
  const std::string& library_version() const { return version_; }
  /// The network's low-rank layers, sorted by name; empty for a dense one. LowRankNormConv is not among them.
  const std::vector<layer_rank>& ranks() const { return ranks_; }
  /// Layers of type LowRankNormConv, sorted by name; nullopt for a file of an earlier version, which does not
  /// list them. restore() then leaves those of the network as they are.
  const std::optional<std::vector<layer_rank>>& factor_norms() const { return factor_norms_; }
  /// The layers that have a residual (annealing.hpp), sorted by name.
  const std::vector<layer_rank>& annealed() const { return annealed_; }
  /// Names of all tensors: parameters, buffers and states.
  const std::vector<std::string>& tensor_names() const { return file_.tensor_names(); }
  /// Names of the flat arrays stored in addition to the network, with their numbers of elements.
  const named_numbers& states() const { return states_; }
  /// Number of elements of the state of this name. Throws io_error if there is none.
  index_t stored_size(const std::string& state) const {
    for (const auto& [stored, size] : states_) {
      if (stored == state) return size;
    }
    detail::throw_error<io_error>(
        {name(), ": the checkpoint has no state ", detail::quote_name(state), " among its ", states_.size()});
  }

  /// Sets the network to the stored structure (which layers are low-rank, their ranks, the widths of
  /// sliced channel groups, and the ChannelSelects of residual blocks) and then to the stored values, bit for
  /// bit. `net` is a network of the same model, freshly built or not, dense or factorized and sliced in any
  /// way. A file of a network that differs only in the widths of channel groups is restored, too. If the
  /// network has the stored structure already, its parameters stay in their memory. Otherwise they move to
  /// new memory, so that optimizers made before throw state_error.
  ///
  /// Also fills `states`. The file must have each of them under its name with the same number of elements. An
  /// empty list ignores stored states, as for inference.
  ///
  /// Throws io_error, naming tensors and both shapes or dtypes, if anything does not fit: layers, names (all
  /// that are missing and all that are unexpected are listed), dtypes, shapes, or, for states, the order of
  /// the arenas; and if the tensors' bytes differ from the digest that save_checkpoint has stored. Then
  /// neither `net` nor `states` has changed. The network may be on a device; the states are on the host. A
  /// change of the structure needs memory for a second network. Local: ranks that restore by themselves read
  /// the file each.
  /// \code
  ///   std::vector<float> momentum(static_cast<std::size_t>(file.stored_size("optimizer.momentum")));
  ///   const std::vector<named_state<float>> states{{"optimizer.momentum", momentum}};
  ///   file.restore(net, states);
  /// \endcode
  template <class Root, class Device, class T = detail::stored_t<model<Root, Device>>>
  void restore(model<Root, Device>& net,
               std::type_identity_t<std::span<const named_state<T>>> states = {}) const {
    check_states<T>(states);
    if (has_structure(net)) {
      check(net, states);
      read_all(net);
    } else {
      model<Root, Device> other = with_structure(net);
      check(other, states);
      read_all(other);
      // Assigned within modify(), so that `net` keeps its identity and its generation count continues.
      other.modify([&](Root& from) { net.modify([&](Root& to) { to = from; }); });
    }
    for (const named_state<T>& state : states) read_tensor<T>(file_, state.name, state.values);
  }

 private:
  friend checkpoint_file open_checkpoint(const std::string& path, std::uint64_t limit);
  friend checkpoint_file parse_checkpoint(std::vector<std::uint8_t> bytes, std::string name);

  // Reads the library's metadata. Throws io_error if they are missing or contradict the tensors.
  explicit checkpoint_file(safetensors_file file) : file_(std::move(file)) {
    const std::string& format = own_entry("format");
    if (format != detail::checkpoint_format) {
      detail::throw_error<io_error>({name(), ": checkpoint format ", detail::quote_name(format),
                                     "; this library reads format ", std::string(detail::checkpoint_format)});
    }
    version_ = own_entry("version");
    layout_ = own_entry("layout");
    const auto ranks_of = [this](std::string_view key, const char* what) {
      return detail::sorted_ranks(
          detail::ranks_from_numbers(parse_json_numbers(own_entry(key), name() + ": the list of " + what)));
    };
    ranks_ = ranks_of("ranks", "ranks");
    if (file_.metadata().count(detail::metadata_name("factor_norms")) > 0) {
      factor_norms_ = ranks_of("factor_norms", "batch norms between factors");
    }
    if (file_.metadata().count(detail::metadata_name("annealed")) > 0) {
      annealed_ = ranks_of("annealed", "layers with a residual");
    }
    states_ = parse_json_numbers(own_entry("states"), name() + ": the list of states");
    for (const auto& [state, size] : states_) {
      if (file_.tensor(state).count() != size) {
        detail::throw_error<io_error>({name(), ": state ", detail::quote_name(state), " has ",
                                       file_.tensor(state).count(), " elements, its list says ", size});
      }
      state_names_.push_back(state);
    }
    std::sort(state_names_.begin(), state_names_.end());
    for (const auto& [key, value] : file_.metadata()) {
      if (!key.starts_with(detail::checkpoint_prefix)) facts_.emplace(key, value);
    }
  }

  // An entry of the library in the metadata. Throws io_error, naming the file, if there is none.
  const std::string& own_entry(std::string_view key) const {
    const auto found = file_.metadata().find(detail::metadata_name(key));
    if (found == file_.metadata().end()) {
      detail::throw_error<io_error>(
          {name(), ": not a checkpoint of this library: its metadata lack ", detail::metadata_name(key)});
    }
    return found->second;
  }

  // Binary search, since the header of a hostile file may list as many states as it has tensors.
  bool is_state(std::string_view tensor) const {
    return std::binary_search(state_names_.begin(), state_names_.end(), tensor);
  }

  // Whether the network has the ranks, widths, residuals and inner batch norms of the file.
  template <class Root, class Device>
  bool has_structure(const model<Root, Device>& net) const {
    return detail::sorted_ranks(low_rank_layers(net)) == ranks_ &&
           layer_widths(net) == detail::stored_widths(net, file_) &&
           detail::sorted_ranks(annealed_layers(net)) == annealed_ &&
           (!factor_norms_ || detail::sorted_ranks(factor_norm_layers(net)) == *factor_norms_);
  }

  /// A copy of the network, brought to the stored structure.
  template <class Root, class Device>
  model<Root, Device> with_structure(const model<Root, Device>& net) const {
    model<Root, Device> result = net;
    try {
      if (!low_rank_layers(result).empty()) merge(result);
      if (factor_norms_) apply_factor_norms(result, *factor_norms_);
      apply_widths(result, detail::stored_widths(result, file_));
      if (!ranks_.empty()) apply_ranks(result, ranks_);
      if (!annealed_.empty()) apply_residuals(result, annealed_);
    } catch (const error& e) {
      detail::throw_error<io_error>({name(), ": the network is of another model: ", e.what()});
    }
    return result;
  }

  // Throws io_error, naming the state, unless the file has these states with these sizes.
  template <class T>
  void check_states(std::span<const named_state<T>> states) const {
    for (const named_state<T>& state : states) {
      stored_size(state.name);
      check_tensor<T>(state.name, {static_cast<index_t>(state.values.size())});
    }
  }

  // Throws io_error unless the file's tensor has this shape and the dtype of T.
  template <class T>
  void check_tensor(const std::string& tensor, const std::vector<index_t>& shape) const {
    const tensor_info& info = file_.tensor(tensor);
    if (info.shape != shape || info.dtype != dtype_of_v<T>) {
      detail::throw_error<io_error>({name(), ": tensor ", detail::quote_name(tensor), " is ",
                                     to_string(info.dtype), " ", detail::shape_text(info.shape),
                                     " in the file, ", to_string(dtype_of_v<T>), " ",
                                     detail::shape_text(shape), " here"});
    }
  }

  // Throws io_error unless the file has exactly the network's tensors, of the same dtypes and shapes, and
  // with `states` the same order of the arenas.
  template <class Root, class Device, class T>
  void check(const model<Root, Device>& net, std::span<const named_state<T>> states) const {
    const detail::name_difference names = detail::compare_names(
        net.store(), file_,
        [this](const std::string& tensor) { return !file_.contains(tensor) || is_state(tensor); },
        [this](const std::string& tensor) { return is_state(tensor); });
    if (!names.empty()) {
      detail::throw_error<io_error>({name(), ": the file is of another network", names.text("network")});
    }
    detail::for_each_entry(net.store(), [&](const auto& entry) {
      check_tensor<T>(entry.name, detail::shape_of(entry.thing->layout()));
    });
    if (!states.empty() && detail::layout_digest(net) != layout_) {
      detail::throw_error<io_error>(
          {name(), ": the network lays its parameters out in another order (digest ",
           detail::layout_digest(net), ", in the file ", layout_, "): stored optimizer state does not fit"});
    }
    check_digest();
  }

  // Throws io_error if the bytes of the tensors are not those that were written. Files of earlier versions
  // have no digest.
  void check_digest() const {
    const auto written = file_.metadata().find(detail::metadata_name("digest"));
    if (written == file_.metadata().end()) return;
    std::vector<std::pair<std::string_view, std::span<const std::uint8_t>>> tensors;
    for (const std::string& tensor : tensor_names()) tensors.emplace_back(tensor, file_.tensor(tensor).bytes);
    const std::string found = detail::data_digest(std::move(tensors));
    if (found != written->second) {
      detail::throw_error<io_error>({name(), ": the tensors are not those that were written (digest ", found,
                                     ", written was ", written->second,
                                     "): the file is damaged, or another program has changed it"});
    }
  }

  /// Reads all tensors into `net`. To be called after check(); then it cannot fail.
  template <class Root, class Device>
  void read_all(model<Root, Device>& net) const {
    using T = detail::stored_t<model<Root, Device>>;
    net.on_host([&](Root&) {
      for (const auto& entry : net.store().parameters()) {
        detail::read_strided(file_.tensor(entry.name).bytes, entry.thing->logical());
      }
      for (const auto& entry : net.store().buffer_entries()) {
        read_tensor<T>(file_, entry.name, entry.thing->values());
      }
    });
  }

  safetensors_file file_;
  std::string version_, layout_;
  std::vector<layer_rank> ranks_;
  std::optional<std::vector<layer_rank>> factor_norms_;
  std::vector<layer_rank> annealed_;
  named_numbers states_;
  std::vector<std::string> state_names_;  // sorted
  std::map<std::string, std::string> facts_;
};

/// Reads and checks a checkpoint. `limit`: largest file accepted, in bytes. Throws io_error if the file
/// cannot be read, is larger, or is not a valid checkpoint (see safetensors_file::read), and for an unknown
/// format version.
inline checkpoint_file open_checkpoint(const std::string& path,
                                       std::uint64_t limit = default_tensor_file_limit) {
  return checkpoint_file(safetensors_file::read(path, limit));
}

/// Checks a checkpoint whose bytes are in memory; error texts call it `name`. Throws io_error if the bytes
/// are not a valid checkpoint, and for an unknown format version.
inline checkpoint_file parse_checkpoint(std::vector<std::uint8_t> bytes, std::string name) {
  return checkpoint_file(safetensors_file::parse(std::move(bytes), std::move(name)));
}

/// Writes the network's parameters and buffers under their names, parameters as frameworks see them (OIHW,
/// [out][in]), and `states` as flat arrays. `facts` is free text that comes back from
/// checkpoint_file::facts(); names that start with "pufferfish." are the library's own (value_error). The
/// file is replaced in one step (see atomic_writer): after an error the old one is still there. Throws
/// io_error if it cannot be written or if two tensors share a name. The network may be on a device, which
/// makes no difference to the file; the states are on the host.
/// Needs memory for a copy of the parameters. Local: one rank calls it. Optimizer and exchange are not part
/// of the file unless `states` names their arrays.
template <class Root, class Device, class T = detail::stored_t<const model<Root, Device>>>
void save_checkpoint(const std::string& path, const model<Root, Device>& net,
                     std::type_identity_t<std::span<const named_state<T>>> states = {},
                     const std::map<std::string, std::string>& facts = {}) {
  for (const auto& [key, value] : facts) {
    if (key.starts_with(detail::checkpoint_prefix)) {
      detail::throw_error<value_error>(
          {path, ": the fact ", detail::quote_name(key), " has a name that is kept for the library"});
    }
  }
  named_numbers sizes;
  for (const auto& state : states) {
    sizes.emplace_back(state.name, static_cast<index_t>(state.values.size()));
  }
  safetensors_metadata metadata = detail::checkpoint_metadata(net, sizes, path);
  metadata.insert(facts.begin(), facts.end());

  net.read_on_host([&](const Root&) {
    std::vector<aligned_buffer<T>> logical;  // each parameter in the order of the file
    std::vector<tensor_entry> entries;
    for (const auto& entry : net.store().parameters()) {
      const parameter<T>& p = *entry.thing;
      const aligned_buffer<T>& values = logical.emplace_back(p.size());
      copy(p.logical(), tensor_view<T, 4>(logical.back().data(), p.layout().shape));
      entries.push_back(make_tensor_entry(entry.name, detail::shape_of(p.layout()), values.span()));
    }
    for (const auto& entry : net.store().buffer_entries()) {
      const state_buffer<T>& b = *entry.thing;
      entries.push_back(make_tensor_entry(entry.name, detail::shape_of(b.layout()), b.values()));
    }
    for (const auto& state : states) {
      entries.push_back(
          make_tensor_entry(state.name, {static_cast<index_t>(state.values.size())}, state.values));
    }
    std::vector<std::pair<std::string_view, std::span<const std::uint8_t>>> tensors;
    for (const tensor_entry& entry : entries) tensors.emplace_back(entry.name, entry.bytes);
    metadata[detail::metadata_name("digest")] = detail::data_digest(std::move(tensors));
    write_safetensors(path, entries, metadata);
  });
}

PUFFERFISH_NAMESPACE_END
