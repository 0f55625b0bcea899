// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `fold_batch_norm`: for inference, folds the batch norms that follow a convolution or a linear
/// layer into that layer.
///
/// \code
/// const batch_norm_folding done = fold_batch_norm(net);  // after training
/// for (const std::string& name : done.kept) std::printf("%s stays\n", name.c_str());
/// \endcode

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <pufferfish/nn/containers/sequential.hpp>
#include <pufferfish/nn/factorize.hpp>
#include <pufferfish/nn/layers/batch_norm.hpp>
#include <pufferfish/nn/layers/conv.hpp>
#include <pufferfish/nn/layers/low_rank_norm_conv.hpp>
#include <pufferfish/nn/model.hpp>
#include <pufferfish/nn/switch/annealing.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A batch norm that was removed, and the layer that it was folded into.
struct folded_batch_norm {
  std::string norm;  ///< name of the batch norm, which is gone
  std::string into;  ///< name of the layer
  friend bool operator==(const folded_batch_norm&, const folded_batch_norm&) = default;
};

/// Result of fold_batch_norm.
struct batch_norm_folding {
  std::vector<folded_batch_norm> folded;  ///< in execution order
  std::vector<std::string> kept;          ///< batch norms that follow no layer they can be folded into
  index_t parameters_before = 0;          ///< of the whole network
  index_t parameters_after = 0;           ///< of the whole network
};

namespace detail {

/// y = scale x + shift for each channel: the function of a batch norm in inference.
struct channel_affine {
  std::vector<double> scale, shift;

  /// scale = weight / sqrt(running_var + eps), shift = bias - running_mean scale; in double.
  template <class T>
  explicit channel_affine(BatchNorm<T>& norm)
      : scale(static_cast<std::size_t>(norm.channels())), shift(scale.size()) {
    const parameter_t<T>*weight = nullptr, *bias = nullptr, *mean = nullptr, *variance = nullptr;
    norm.visit([&](const char* name, auto& thing) {
      const std::string called = name;
      if (called == "weight") weight = thing.data();
      if (called == "bias") bias = thing.data();
      if (called == "running_mean") mean = thing.data();
      if (called == "running_var") variance = thing.data();
    });
    for (std::size_t c = 0; c < scale.size(); ++c) {
      scale[c] = static_cast<double>(weight[c]) / std::sqrt(static_cast<double>(variance[c]) + norm.eps());
      shift[c] = static_cast<double>(bias[c]) - static_cast<double>(mean[c]) * scale[c];
    }
  }

  /// Number of channels.
  index_t channels() const { return static_cast<index_t>(scale.size()); }

  /// to = from with row r scaled by the scale of channel first + r. [out][in][height][width], any strides.
  /// `to` may be `from`.
  template <class T>
  void apply(index_t first, const tensor_view<const T, 4>& from, const tensor_view<T, 4>& to) const {
    for (index_t r = 0; r < from.extent(0); ++r) {
      const double factor = scale[static_cast<std::size_t>(first + r)];
      for (index_t i = 0; i < from.extent(1); ++i) {
        for (index_t y = 0; y < from.extent(2); ++y) {
          for (index_t x = 0; x < from.extent(3); ++x) {
            to(r, i, y, x) = static_cast<T>(factor * static_cast<double>(from(r, i, y, x)));
          }
        }
      }
    }
  }
  /// to = scale from + shift, for a bias; a null view `from` counts as zeros.
  template <class T>
  void apply_to_bias(const tensor_view<const T, 1>& from, const tensor_view<T, 1>& to) const {
    for (index_t c = 0; c < channels(); ++c) {
      const auto i = static_cast<std::size_t>(c);
      to(c) = static_cast<T>((from.is_null() ? 0.0 : static_cast<double>(from(c))) * scale[i] + shift[i]);
    }
  }
};

/// Number of output channels of a layer whose channels are the rows of its matrices; 0 for other layers. The
/// rows of several matrices are counted together, as those of a convolution with groups.
template <class T, class Device>
index_t foldable_channels(any_layer<T, Device>& layer) {
  const auto parts = layer.low_rank();
  const auto weights = layer.weights({});
  index_t channels = 0;
  if (parts.rows_are_outputs) {
    for (const auto& one : parts.factors) channels += one.up.extent(0);
  }
  if (weights.rows_are_outputs) {
    for (const auto& one : weights.matrices) channels += one.view.extent(0);
  }
  return channels;
}

/// A layer of the kind and ranks of `layer` that computes norm(layer(x)). The scale is applied to the rows of
/// the matrices, or of `up`; the bias becomes scale b + shift. `layer` is not changed.
template <class T, class Device>
any_layer<T, Device> folded(any_layer<T, Device>& layer, const channel_affine& norm) {
  using P = parameter_t<T>;
  // The result has a bias even if `layer` has none, because of the shift.
  any_layer<T, Device> result = layer.twin(layer.ranks(), true);
  const low_rank_parts<P> from = layer.low_rank(), to = result.low_rank();
  index_t row = 0;
  for (std::size_t i = 0; i < from.factors.size(); ++i) {
    copy(tensor_view<const P, 4>(from.factors[i].down), to.factors[i].down);
    norm.apply(row, tensor_view<const P, 4>(from.factors[i].up), to.factors[i].up);
    row += from.factors[i].up.extent(0);
  }
  if (from.is_low_rank()) {
    norm.apply_to_bias(tensor_view<const P, 1>(from.biases[0]), to.biases[0]);
    return result;
  }
  const layer_weights<P> dense = layer.weights({}), scaled = result.weights({});
  for (std::size_t i = 0; i < dense.matrices.size(); ++i) {
    norm.apply(row, dense.matrices[i].view, writable(scaled.matrices[i].view));
    row += dense.matrices[i].view.extent(0);
  }
  tensor<P, 1> bias({norm.channels()});  // sum of the biases of the layer
  std::fill(bias.flat().begin(), bias.flat().end(), P{});
  for (const named_view<const P, 1>& one : dense.biases) {
    for (index_t c = 0; !one.view.is_null() && c < norm.channels(); ++c) bias(c) += one.view(c);
  }
  norm.apply_to_bias(tensor_view<const P, 1>(bias), writable(scaled.biases[0].view));
  return result;
}

/// Folds the batch norm between the factors, up (scale (down x) + shift) + b: `down` is scaled, and the new
/// bias is up shift + b, summed in double.
template <class T, class Device>
LowRankConv<T> folded(LowRankNormConv<T, Device>& layer) {
  using P = parameter_t<T>;
  const channel_affine norm(*layer[1].template target<BatchNorm<T>>());
  LowRankConv<T> result(layer.shape(), layer.rank(), true);
  const low_rank_parts<P> from = layer.factors(), to = parts_of(result);
  index_t row = 0, out = 0;
  for (std::size_t g = 0; g < from.factors.size(); ++g) {
    const tensor_view<P, 4>&down = from.factors[g].down, &up = from.factors[g].up;
    norm.apply(row, tensor_view<const P, 4>(down), to.factors[g].down);
    copy(tensor_view<const P, 4>(up), to.factors[g].up);
    for (index_t o = 0; o < up.extent(0); ++o, ++out) {
      double sum = layer.has_bias() ? static_cast<double>(from.biases[0](out)) : 0.0;
      for (index_t r = 0; r < up.extent(1); ++r) {
        sum += static_cast<double>(up(o, r, 0, 0)) * norm.shift[static_cast<std::size_t>(row + r)];
      }
      to.biases[0](out) = static_cast<P>(sum);
    }
    row += down.extent(0);
  }
  return result;
}

/// Layer visitor that throws state_error, naming the layer, for factors with a probe between them (see
/// insert_factor_norms) and for an AnnealedLayer. Run before a network is changed, so that an error changes
/// nothing.
template <class T, class Device>
class settled_check final : public layer_visitor<T, Device> {
 public:
  void on_layer(const std::string& name, any_layer<T, Device>& slot) override {
    if (slot.template target<AnnealedLayer<T, Device>>() != nullptr) {
      throw_error<state_error>({"fold_batch_norm: ", name, " has a residual: call detach_residuals first"});
    }
    auto* const layer = slot.template target<LowRankNormConv<T, Device>>();
    if (layer == nullptr || (*layer)[1].template target<BatchNorm<T>>() != nullptr) return;
    throw_error<state_error>({"fold_batch_norm: ", name, " has ", (*layer)[1].describe(),
                              " between its factors, no batch norm: call settle_factor_norms first"});
  }
};

/// Layer visitor that folds the batch norms of each Sequential into the layers before them, and fills the
/// report.
template <class T, class Device>
class batch_norm_folder final : public layer_visitor<T, Device> {
 public:
  /// Fills `report`, which must outlive the object.
  explicit batch_norm_folder(batch_norm_folding& report) : report_(report) {}

  // Folds from the first layer on; a layer takes all batch norms that follow it directly.
  void on_sequence(const std::string& prefix, Sequential<T, Device>& layers) override {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const std::string name = join_name(prefix, layers.name(i));
      // The LowRankConv that results can take the batch norms after it, too.
      if (auto* inner = layers[i].template target<LowRankNormConv<T, Device>>()) {
        layers[i] = any_layer<T, Device>(folded(*inner));
        report_.folded.push_back({join_name(name, "bn"), name});
      }
      while (i + 1 < layers.size() && fold(layers[i], layers[i + 1])) {
        report_.folded.push_back({join_name(prefix, layers.name(i + 1)), name});
        layers.erase(i + 1);
      }
    }
  }

  // on_sequence has removed all batch norms that can be folded before this is called.
  void on_layer(const std::string& name, any_layer<T, Device>& slot) override {
    if (slot.template target<BatchNorm<T>>() != nullptr) report_.kept.push_back(name);
  }

 private:
  // If the second layer is a batch norm with the channels of the first one, folds it into the first one and
  // returns true.
  static bool fold(any_layer<T, Device>& layer, any_layer<T, Device>& behind) {
    auto* norm = behind.template target<BatchNorm<T>>();
    if (norm == nullptr || foldable_channels(layer) != norm->channels()) return false;
    layer = folded(layer, channel_affine(*norm));
    return true;
  }

  batch_norm_folding& report_;
};

}  // namespace detail

/// Folds every batch norm that follows a convolution or a linear layer in a Sequential (also in the
/// branches of residual blocks) into that layer, which may be dense, low-rank, or of another library with
/// layer_traits. With s = weight / sqrt(running variance + eps), W becomes s W (in a low-rank layer `up`
/// becomes s up), and the bias becomes s (b - running mean) + the norm's bias. A LowRankNormConv becomes
/// a LowRankConv. Outputs in inference mode stay the same up to rounding. Outputs in training mode
/// change, because nothing is normalised by the batch any more: for networks whose training is finished.
///
/// Batch norms elsewhere stay and are reported. Layers with a static rank become layers with the
/// same rank set at run time. New arenas, a new generation: optimizers and exchanges of the old one
/// throw from now on. Throws state_error, and changes nothing, between observe_factors and
/// settle_factor_norms, and for layers with residuals (attach_residuals).
template <class Root, class Device>
batch_norm_folding fold_batch_norm(model<Root, Device>& net) {
  batch_norm_folding result;
  result.parameters_before = net.parameter_count();
  net.modify([&](Root& root) {
    detail::settled_check<typename Root::value_type, Device> check;
    root.visit_layers(check);
    detail::batch_norm_folder<typename Root::value_type, Device> folder(result);
    root.visit_layers(folder);
  });
  result.parameters_after = net.parameter_count();
  return result;
}

PUFFERFISH_NAMESPACE_END
