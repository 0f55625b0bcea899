// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `model<Root>`: layers in any arrangement, with their arenas, as a value. `network` is a model
/// from one tensor to another; language models and Transformers have a Root of their own.
///
/// Interface of a Root (ExampleRoot is documentation, no such class exists):
///
///     class ExampleRoot {                                       // copyable, copies are deep
///      public:
///       using value_type = T;
///       // Parameters and buffers.
///       void visit_state(state_visitor<parameter_t<T>>&, const std::string& prefix = {});
///       void visit_layers(layer_visitor<T, Device>&, const std::string& prefix = {});   // replaceable slots
///       void initialize(random_stream);
///     };
///
/// Both visits run in execution order, containers before their contents, with names joined by dots.
/// Forward and backward passes of a Root may have any arguments.

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <pufferfish/core/record_line.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/nn/containers/any_layer.hpp>
#include <pufferfish/nn/parameter_store.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A Root and the arenas of its parameters, gradients and buffers. Copying copies the arenas and
/// binds the copy's layers to them; moving leaves layers and arenas at their addresses.
///
/// Values are in store().values(), gradients in store().gradients(): one loop updates all parameters. Layers
/// are replaced only through modify() and rearrange(), which lay out new arenas and raise generation();
/// optimizers and exchanges made for an older generation throw state_error from then on, as do those of a
/// model that is assigned another value or destroyed.
///
/// \code
/// auto net = make_lstm_lm<float>(lstm_lm_options{});
/// net.initialize(1);
/// const model<lstm_lm<float>> copy = net;               // arenas of its own
/// SGD<float> optimizer(make_optimizer_target(net.store()), {.momentum = 0.9});
/// net.on_host([](auto& root) { root.initialize({2, 2}); });  // any change of values
/// \endcode
template <class Root, class Device = device::cpu>
class model {
 public:
  using value_type = typename Root::value_type;
  using parameter_type = parameter_t<value_type>;
  using device_type = Device;
  using layer_type = any_layer<value_type, Device>;

  /// Lays out the arenas. Throws value_error if two parameters or buffers have the same name, state_error for
  /// a moved-from layer.
  explicit model(Root root) : state_(std::make_unique<state>(std::move(root))) { pack(); }
  /// Copies the root, with the values of parameters and buffers; the copy has arenas of its own. Waits for a
  /// device.
  model(const model& other) : model(other.copied_root()) {}
  model(model&&) noexcept = default;
  model& operator=(model other) noexcept {
    state_ = std::move(other.state_);
    return *this;
  }
  ~model() = default;

  /// Every member but assignment throws state_error once the model was moved from.
  bool is_moved_from() const { return state_ == nullptr; }

  /// The layers, for passes through them. They may not be replaced here: see modify.
  const Root& root() const { return self().root; }

  /// Random initial values, a pure function of the seed and each layer's name.
  void initialize(std::uint64_t seed) {
    on_host([&](Root& root) { root.initialize({seed, stream_id("initialize")}); });
  }

  /// Calls change(Root&) while the host may read and write all values and buffers, wherever they are stored.
  /// The changes are stored back unless `change` throws. For a model on a device, waits for the device.
  template <class Change>
  void on_host(Change&& change) {
    host_scope scope(self().store);
    change(self().root);
    scope.keep();
  }
  /// Calls look(root) with the parameters on the host, for reading only. Nothing is copied back.
  template <class Look>
  void read_on_host(Look&& look) const {
    const host_scope scope(self().store);
    look(std::as_const(self().root));
  }

  /// The arenas; see parameter_store.
  parameter_store<parameter_type>& store() { return self().store; }
  const parameter_store<parameter_type>& store() const { return self().store; }
  /// Number of the present arenas; changes when they move, as in modify(). Optimizers and exchanges compare
  /// it.
  std::uint64_t generation() const { return self().store.generation(); }
  /// Number of elements of all parameters.
  index_t parameter_count() const { return self().store.size(); }

  /// Calls change(Root&), which may replace and add layers, then lays out new arenas; layers that
  /// remain keep their values. Raises the generation. If `change` throws, it must have changed nothing. If
  /// the layout throws (two parameters of one name), the generation is raised, too, and the store has no
  /// entries: optimizers and exchanges throw state_error. For a model on a device, its values are copied to
  /// the host and back.
  template <class Change>
  void modify(Change&& change) {
    host_scope scope(self().store);
    change(self().root);
    scope.release();
    pack();
  }

  /// Calls change(root), which may replace layers but neither reads nor writes a value, and makes new arenas.
  /// Values stay on their device, which copies them to the new arenas. If memory for the new arenas runs out,
  /// the layers are as `change` left them, on the old arenas, and the store has no entries (see modify).
  template <class Change>
  void rearrange(Change&& change) {
    change(self().root);
    pack();
  }

  /// Shows the slots below the root to a visitor, which may not replace their layers.
  void visit_layers(layer_visitor<value_type, Device>& visitor) const { self().root.visit_layers(visitor); }

  /// Calls f(name, const any_layer&) for every layer below the root, containers before their contents.
  template <class F>
  void for_each_layer(F&& f) const {
    struct caller final : layer_visitor<value_type, Device> {
      explicit caller(F& g) : call(g) {}
      void on_layer(const std::string& name, layer_type& slot) override { call(name, std::as_const(slot)); }
      F& call;
    } visitor(f);
    visit_layers(visitor);
  }

  /// The structure in lines, "layer1.0.conv1.weight [16 x 16 x 3 x 3]": all parameters, then all buffers,
  /// in arena order. Ranks of a distributed run have the same model only if these lines are equal.
  std::string structure() const {
    std::string text;
    for (const auto& entry : self().store.parameters()) {
      text += detail::quote_word(entry.name) + " " + to_string(entry.thing->layout()) + "\n";
    }
    for (const auto& entry : self().store.buffer_entries()) {
      text += detail::quote_word(entry.name) + " " + to_string(entry.thing->layout()) + "\n";
    }
    return text;
  }

 private:
  using host_scope = detail::host_scope<parameter_type>;

  // A copy of the root whose values are on the host.
  Root copied_root() const {
    std::optional<Root> copy;
    read_on_host([&](const Root& root) { copy.emplace(root); });
    return std::move(*copy);
  }

  // Held by a pointer: moving a model leaves the parameters at the addresses in the arenas' entries.
  struct state {
    explicit state(Root r) : root(std::move(r)) {}
    Root root;
    parameter_store<parameter_type> store{memory_of<Device>::source(), rounded_format_of<value_type>};
  };

  // Moves the values of the root's parameters and buffers to the arenas.
  void pack() {
    // If the layout throws, the store's entries may be of layers that are gone.
    struct packing {
      ~packing() {
        if (store != nullptr) store->abandon();
      }
      parameter_store<parameter_type>* store;
    } now{&self().store};
    now.store->pack([this](state_visitor<parameter_type>& visitor) { self().root.visit_state(visitor); });
    now.store = nullptr;
  }

  // The state. Throws state_error for a model that was moved from.
  state& self() const {
    if (state_ == nullptr) detail::moved_from("model");
    return *state_;
  }

  std::unique_ptr<state> state_;  // nullptr: moved from
};

/// Copies the values and buffers of a model to another of the same structure; the devices may differ.
/// Throws state_error, naming the first difference, if the structures differ. Waits for devices.
template <class From, class FromDevice, class To, class ToDevice>
void copy_state(const model<From, FromDevice>& from, model<To, ToDevice>& to) {
  const std::string there = from.structure(), here = to.structure();
  if (there != here) {
    const auto at = static_cast<std::size_t>(
        std::mismatch(there.begin(), there.end(), here.begin(), here.end()).first - there.begin());
    const auto line = [at](const std::string& text) {
      const std::size_t begin = at == 0 ? 0 : text.rfind('\n', at - 1) + 1;
      return text.substr(begin, text.find('\n', begin) - begin);
    };
    detail::throw_error<state_error>(
        {"copy_state: the models differ: \"", line(there), "\" and \"", line(here), "\""});
  }
  from.read_on_host([&](const From&) {
    to.on_host([&](To&) {
      const auto copy_all = [](const auto& sources, const auto& targets) {
        for (std::size_t i = 0; i < sources.size(); ++i) {
          const auto values = sources[i].thing->values();
          std::copy(values.begin(), values.end(), targets[i].thing->values().begin());
        }
      };
      copy_all(from.store().parameters(), to.store().parameters());
      copy_all(from.store().buffer_entries(), to.store().buffer_entries());
    });
  });
}

PUFFERFISH_NAMESPACE_END
