// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: the sums of a statistics_recorder, layer by layer, from the operations that libtorch runs.

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <pufferfish/adapters/torch/module_places.hpp>
#include <pufferfish/nn/measure/collect_statistics.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace host_torch {
namespace detail {

/// Converts a tensor to float or double rows on the CPU; dimension `dimension`, of size `columns`, becomes
/// the last. The result is a copy unless the tensor has this form already.
inline Tensor as_rows(const Tensor& t, std::int64_t dimension, std::int64_t columns) {
  Tensor rows = t.detach().movedim(dimension, -1).reshape({-1, columns}).to(torch::kCPU);
  if (rows.scalar_type() != torch::kDouble) rows = rows.to(torch::kFloat);
  return rows.contiguous();
}

/// Whether a module can be factorized. The recorder leaves other modules out.
template <class Module>
bool has_factors(const Module& m) {
  try {
    module_traits<Module>::weights(m, 0);
    return true;
  } catch (const value_error&) {
    return false;
  }
}

/// The operation that multiplies with a weight. A product is that of a linear layer.
enum class weight_use { product, conv, table, lstm_input, lstm_hidden };

/// Rows that an LSTM layer has multiplied in a forward pass: its input, and the state before each step.
struct lstm_pass {
  Tensor input;
  std::vector<Tensor> hidden;
};

/// The sums of one weight, which stacks one or more matrices of equal size in its first dimension. The caller
/// locks `mutex`.
class recorded_weight {
 public:
  /// `bias`: of a product, may be undefined. `most`: see statistics_recorder.
  recorded_weight(const Tensor& w, weight_use used, std::int64_t count, index_t most, const Tensor& b = {})
      : weight(w), bias(b.defined() ? b.detach() : b), use(used), most_(most) {
    const std::int64_t rows = w.size(0), columns = rows == 0 ? 0 : w.numel() / rows;
    const output_statistics empty = use == weight_use::table ? output_statistics(columns, rows)
                                                             : output_statistics(rows / count, columns);
    matrices_.assign(static_cast<std::size_t>(count), empty);
  }

  const Tensor weight;  // kept, so that no other tensor gets its address
  const Tensor bias;
  const weight_use use;
  std::shared_ptr<recorded_weight> hidden;                   // of the same LSTM layer, for lstm_input
  std::int64_t sample_dimension = 0;                         // of the input of an LSTM layer, for lstm_input
  std::map<std::thread::id, std::weak_ptr<lstm_pass>> open;  // each thread's last pass, for lstm_hidden
  std::uint64_t passes = 0;                                  // selects the rows that the next pass samples
  mutable std::mutex mutex;

  std::size_t count() const { return matrices_.size(); }
  /// Number of outputs (rows) of each matrix; inputs(): number of columns.
  index_t outputs() const { return matrices_.front().outputs(); }
  index_t inputs() const { return matrices_.front().inputs(); }

  /// Whether inputs are narrow enough to be summed; sums_outputs(): whether outputs are.
  bool sums_inputs() const { return inputs() <= output_statistics::largest_moment; }
  bool sums_outputs() const { return outputs() <= output_statistics::largest_moment; }

  /// The add functions are for matrices first .. first + count - 1. `rows` has the columns of all of them;
  /// `pass` selects the sample of the rows. `add_batch` counts rows without adding them.
  void add_batch(std::size_t first, std::size_t count, double rows, double samples) {
    for (std::size_t i = first; i < first + count; ++i) matrices_[i].add_batch(rows, samples);
  }
  /// The matrices share the inputs, which are summed once. Inputs and outputs wider than largest_moment are
  /// left out.
  void add_inputs(std::size_t first, std::size_t count, std::uint64_t pass, const Tensor& rows) {
    if (!sums_inputs()) return;
    output_statistics& sums =
        count == 1 ? matrices_[first]
                   : shared_inputs_.try_emplace({first, count}, outputs(), inputs()).first->second;
    with_sample(rows, pass, [&](const auto& x) { sums.add_inputs(x); });
  }
  void add_outputs(std::size_t first, std::size_t count, std::uint64_t pass, const Tensor& rows) {
    if (!sums_outputs()) return;
    with_sample(rows, pass, [&](const auto& y) {
      for (std::size_t i = 0; i < count; ++i) matrices_[first + i].add_outputs(own_columns(y, i));
    });
  }
  void add_gradients(std::size_t first, std::size_t count, std::uint64_t pass, const Tensor& rows,
                     double samples) {
    with_sample(rows, pass, [&](const auto& dy) {
      for (std::size_t i = 0; i < count; ++i) matrices_[first + i].add_gradients(own_columns(dy, i), samples);
    });
  }
  void add_tokens(const Tensor& given) {
    const Tensor tokens = given.detach().to(torch::kCPU, torch::kInt).contiguous();
    matrices_[0].add_tokens({tokens.data_ptr<std::int32_t>(), static_cast<std::size_t>(tokens.numel())});
  }

  /// Returns the statistics of matrix i of the weight.
  output_statistics statistics(std::size_t i) const {
    output_statistics all = matrices_[i];
    for (const auto& [range, sums] : shared_inputs_) {
      if (i >= range.first && i < range.first + range.second) all.merge(sums);
    }
    return all;
  }

 private:
  template <class T>
  tensor_view<const T, 2> own_columns(const tensor_view<const T, 2>& rows, std::size_t i) const {
    return rows.slice(1, static_cast<index_t>(i) * outputs(), outputs());
  }

  // Calls add(view) with evenly spaced rows of a matrix of float or double.
  template <class Add>
  void with_sample(const Tensor& rows, std::uint64_t pass, const Add& add) const {
    const index_t columns = rows.size(1);
    const auto with = [&](auto scalar) {
      using T = decltype(scalar);
      for (const auto& part : pufferfish::detail::sample_rows(rows.size(0), columns, most_, pass)) {
        if (part.rows == 0) continue;
        add(tensor_view<const T, 2>(rows.data_ptr<T>() + part.first * columns, {part.rows, columns},
                                    {part.step * columns, 1}));
      }
    };
    rows.scalar_type() == torch::kDouble ? with(double()) : with(float());
  }

  index_t most_;
  std::vector<output_statistics> matrices_;
  std::map<std::pair<std::size_t, std::size_t>, output_statistics> shared_inputs_;  // by first, count
};

/// The sums of one recorder. Passes run on several threads: autograd calls hooks on threads of its own. Each
/// weight has a mutex for its sums; the lists do not change.
class recorded_layers {
 public:
  /// `rows_of_step`, `samples`: see statistics_recorder.
  recorded_layers(torch::nn::Module& root, index_t rows_of_step, index_t samples)
      : rows_of_step_(rows_of_step), samples_(samples) {
    for (const module_place& place : place_finder(root).places) add(place);
  }

  /// Called after an operation. `first` and `second`: its input and the weight, which is transposed for
  /// addmm and matmul; for an embedding, the weight and the tokens.
  void see(std::string_view operation, const Tensor& first, const Tensor& second, const Tensor& outputs) {
    const bool table = operation == "aten::embedding";
    const bool transposed = operation == "aten::addmm" || operation == "aten::matmul";
    const weight_part part = find(table ? first : second, transposed);
    if (part.weight == nullptr || (part.weight->use == weight_use::table) != table) return;
    const weight_use use = part.weight->use;
    if (use == weight_use::lstm_input || use == weight_use::lstm_hidden) {
      if (operation != "aten::linear") return;  // on other devices, libtorch multiplies step by step
      return use == weight_use::lstm_input ? begin_sequence(part.weight, first, outputs)
                                           : add_step(*part.weight, first);
    }
    if (outputs.requires_grad()) see_rows(part, operation, first, second, outputs);  // a training pass
  }

  /// Statistics of the layers that have been used.
  network_statistics statistics() const {
    network_statistics all;
    for (const layer& from : layers_) {
      layer_statistics one;
      one.name = from.name;
      bool used = false;
      for (const auto& weight : from.weights) {
        const std::lock_guard lock(weight->mutex);
        for (std::size_t i = 0; i < weight->count(); ++i) {
          one.matrices.push_back(weight->statistics(i));
          used = used || one.matrices.back().has_rows();
        }
      }
      if (used) all.layers.push_back(std::move(one));
    }
    return all;
  }

 private:
  using weight_ptr = std::shared_ptr<recorded_weight>;

  /// The weights of a layer, in the order in which factorize lists their matrices.
  struct layer {
    std::string name;
    std::vector<weight_ptr> weights;
  };
  /// Some matrices of a weight; the weight is null if there are none.
  struct weight_part {
    weight_ptr weight;
    std::size_t first = 0, count = 0;
  };

  // The recorded weight that `t` is, or of which `t` is a view of some rows. `transposed`: `t` is to be a
  // transposed view.
  weight_part find(const Tensor& t, bool transposed) const {
    auto found = by_weight_.find(t.unsafeGetTensorImpl());
    const bool whole = found != by_weight_.end();
    if (!whole && t.is_view()) found = by_weight_.find(t._base().unsafeGetTensorImpl());
    if (found == by_weight_.end()) return {};
    const Tensor& weight = found->second->weight;
    if (whole) return transposed ? weight_part() : weight_part{found->second, 0, found->second->count()};
    const std::int64_t row = transposed ? 1 : 0, column = 1 - row;
    if (t.dim() != 2 || weight.dim() != 2 || t.size(row) == 0 || t.size(column) != weight.size(1) ||
        t.stride(row) != weight.stride(0) || t.stride(column) != weight.stride(1)) {
      return {};
    }
    const std::int64_t offset = t.storage_offset() - weight.storage_offset(), stride = weight.stride(0);
    const std::int64_t matrix = found->second->outputs();
    if (offset < 0 || offset % (stride * matrix) != 0 || t.size(row) % matrix != 0) return {};
    return {found->second, static_cast<std::size_t>(offset / (stride * matrix)),
            static_cast<std::size_t>(t.size(row) / matrix)};
  }

  // Adds an operation's rows, and those of its gradient as soon as it is known.
  void see_rows(const weight_part& part, std::string_view operation, const Tensor& first,
                const Tensor& second, const Tensor& outputs) {
    const auto [weight, from, count] = part;
    const std::int64_t dimension = weight->use == weight_use::conv ? 1 : -1;
    const std::int64_t columns = static_cast<std::int64_t>(count) * weight->outputs();
    const double samples = samples_of(outputs.dim() > 1 ? outputs.size(0) : 1);
    std::uint64_t pass = 0;
    {
      const std::lock_guard lock(weight->mutex);
      pass = weight->passes++;
      weight->add_batch(from, count, static_cast<double>(outputs.numel()) / static_cast<double>(columns),
                        samples);
      if (weight->use == weight_use::table) {
        weight->add_tokens(second);
      } else if (weight->use == weight_use::product && weight->inputs() <= weight->outputs()) {
        if (weight->sums_inputs())
          weight->add_inputs(from, count, pass, as_rows(first, -1, weight->inputs()));
      } else if (weight->sums_outputs()) {
        // libtorch adds the bias after a matmul.
        const bool later = operation == "aten::matmul" && weight->bias.defined();
        weight->add_outputs(from, count, pass,
                            as_rows(later ? outputs + weight->bias : outputs, dimension, columns));
      }
    }
    outputs.register_hook([part, dimension, columns, samples, pass](const Tensor& gradient) {
      const torch::NoGradGuard none;
      const std::lock_guard lock(part.weight->mutex);
      part.weight->add_gradients(part.first, part.count, pass, as_rows(gradient, dimension, columns),
                                 samples);
    });
  }

  // An LSTM layer multiplies the input of all steps, then the state before each step. The gradient of the
  // first product is that of the gates' preactivations at all steps, for both products.
  void begin_sequence(const weight_ptr& weight, const Tensor& input, const Tensor& outputs) {
    const bool training = outputs.requires_grad();
    const auto pass = training ? std::make_shared<lstm_pass>() : nullptr;
    {
      const std::lock_guard lock(weight->hidden->mutex);
      auto& open = weight->hidden->open;
      std::erase_if(open, [](const auto& entry) { return entry.second.expired(); });  // of ended threads, too
      open[std::this_thread::get_id()] = pass;
    }
    if (!training) return;
    pass->input = input.detach();
    // A packed sequence has one dimension for steps and samples.
    const double samples = samples_of(input.size(input.dim() == 3 ? weight->sample_dimension : 0));
    outputs.register_hook([weight, pass, samples](const Tensor& gradient) {
      const torch::NoGradGuard none;
      add_sequence(*weight, *pass, gradient, samples);
    });
  }
  static void add_step(recorded_weight& weight, const Tensor& before) {
    const std::lock_guard lock(weight.mutex);
    const auto found = weight.open.find(std::this_thread::get_id());
    const auto pass = found == weight.open.end() ? nullptr : found->second.lock();
    if (pass != nullptr) pass->hidden.push_back(before.detach());
  }
  // A first state of zeros is no input of the hidden side, as in this library's LSTM without a state.
  static void add_sequence(recorded_weight& input, const lstm_pass& pass, const Tensor& gradient,
                           double samples) {
    const auto add = [&](recorded_weight& side, const Tensor& x, const Tensor& dz) {
      const std::lock_guard lock(side.mutex);
      const std::uint64_t number = side.passes++;
      side.add_batch(0, side.count(), static_cast<double>(dz.size(0)), samples);
      side.add_inputs(0, side.count(), number, x);
      side.add_gradients(0, side.count(), number, dz, samples);
    };
    const Tensor dz = as_rows(gradient, -1, gradient.size(-1));
    add(input, as_rows(pass.input, -1, input.inputs()), dz);
    if (pass.hidden.empty()) return;
    const Tensor h = as_rows(torch::cat(pass.hidden), -1, input.hidden->inputs());
    const bool state = pass.hidden.front().any().item<bool>();
    const std::int64_t first = state ? 0 : pass.hidden.front().size(0), rows = h.size(0) - first;
    add(*input.hidden, h.narrow(0, first, rows), dz.narrow(0, dz.size(0) - rows, rows));
  }

  double samples_of(std::int64_t counted) const {
    return static_cast<double>(samples_ > 0 ? samples_ : counted);
  }

  // Registers the weights of a place's layer if it can be factorized.
  void add(const module_place& place) {
    layer made{place.name, {}};
    const auto watch = [&](const Tensor& weight, weight_use use, std::int64_t count,
                           const Tensor& bias = {}) {
      made.weights.push_back(std::make_shared<recorded_weight>(weight, use, count, rows_of_step_, bias));
      by_weight_[weight.unsafeGetTensorImpl()] = made.weights.back();
      return made.weights.back();
    };
    if (const auto* linear = exactly<torch::nn::LinearImpl>(*place.layer)) {
      watch(linear->weight, weight_use::product, 1, linear->bias);
    } else if (const auto* conv = exactly<torch::nn::Conv2dImpl>(*place.layer)) {
      watch(conv->weight, weight_use::conv, conv->options.groups());
    } else if (const auto* embedding = exactly<torch::nn::EmbeddingImpl>(*place.layer)) {
      watch(embedding->weight, weight_use::table, 1);
    } else if (const auto* attention = exactly<torch::nn::MultiheadAttentionImpl>(*place.layer);
               attention != nullptr && has_factors(*attention)) {
      watch(attention->in_proj_weight, weight_use::product, 3);
      watch(attention->out_proj->weight, weight_use::product, 1, attention->out_proj->bias);
    } else if (const auto* lstm = exactly<torch::nn::LSTMImpl>(*place.layer);
               lstm != nullptr && has_factors(*lstm)) {
      using traits = module_traits<torch::nn::LSTMImpl>;
      for (std::int64_t l = 0; l < traits::layers(*lstm); ++l) {
        const weight_ptr input = watch(traits::tensor(*lstm, l, 0), weight_use::lstm_input, 4);
        input->hidden = watch(traits::tensor(*lstm, l, 1), weight_use::lstm_hidden, 4);
        input->sample_dimension = lstm->options.batch_first() ? 1 : 0;
      }
    }
    if (!made.weights.empty()) layers_.push_back(std::move(made));
  }

  index_t rows_of_step_, samples_;
  std::vector<layer> layers_;
  std::map<const void*, weight_ptr> by_weight_;
};

}  // namespace detail
}  // namespace host_torch
PUFFERFISH_NAMESPACE_END
