// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The base class of the low-rank layers of adapters/dlib.hpp.

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <istream>
#include <memory>
#include <ostream>
#include <string>
#include <utility>

#include <pufferfish/adapters/dlib_traits.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace detail {

/// The extents of dlib's tensor (NCHW in memory) in the order NHWC.
inline extents<4> nhwc_extents(const ::dlib::tensor& x) {
  return {static_cast<index_t>(x.num_samples()), static_cast<index_t>(x.nr()), static_cast<index_t>(x.nc()),
          static_cast<index_t>(x.k())};
}

/// Reads a number that dlib::serialize has written as a long.
inline index_t read_long(std::istream& in) {
  long number = 0;
  ::dlib::deserialize(number, in);
  return number;
}

/// Transposes each of `images` matrices from rows x cols to cols x rows. `add`: adds the result to `to`.
/// Element (i, j) of each image is read at i cols + j and written at j rows + i. The two arrays do not
/// overlap.
inline void turn_images(cpu_context& ctx, const float* from, index_t images, index_t rows, index_t cols,
                        float* to, bool add) {
  // Cache lines of a tile stay in the first-level cache while the tile is transposed.
  constexpr index_t tile = 32;
  const index_t bands = (cols + tile - 1) / tile;
  ctx.parallel_for(images * bands, [&](index_t task, int) {
    const float* source = from + task / bands * rows * cols;
    float* target = to + task / bands * rows * cols;
    const index_t first = task % bands * tile, end = std::min(first + tile, cols);
    for (index_t top = 0; top < rows; top += tile) {
      const index_t bottom = std::min(top + tile, rows);
      for (index_t j = first; j < end; ++j) {
        float* line = target + j * rows;
        if (add) {
          for (index_t i = top; i < bottom; ++i) line[i] += source[i * cols + j];
        } else {
          for (index_t i = top; i < bottom; ++i) line[i] = source[i * cols + j];
        }
      }
    }
  });
}

/// Parameters, options and working memory of a low-rank layer. Parameters are one tensor: `down` (in r
/// elements), then `up` (r out), then the bias (out), as dlib's solvers and serialization expect. They are
/// allocated by the first pass (setup), factorize or deserialize. A copy of a layer copies parameters and
/// options but neither the context nor the kept activation. One thread at a time uses a layer.
class dlib_layer {
 public:
  /// The rank. Before the first pass: the wanted rank, 0 for a quarter of the full rank.
  index_t rank() const { return params_.size() > 0 ? rank_ : wanted_; }
  /// Replaces the rank of the type; 0: a quarter of the full rank. Allowed before the first pass only, else
  /// throws state_error; value_error for a negative rank.
  void set_rank(long rank) {
    check_can_change("ranks", rank, static_cast<long>(this->rank()), 0);
    wanted_ = rank;
  }

  /// Multipliers as in dlib's con_ and fc_. The solver applies them; with a learning rate multiplier of 0 the
  /// backward pass does not write the gradients of the parameters. Those of the bias need a bias_solver.
  double get_learning_rate_multiplier() const { return learning_rate_; }
  double get_weight_decay_multiplier() const { return weight_decay_; }
  void set_learning_rate_multiplier(double value) { learning_rate_ = value; }
  void set_weight_decay_multiplier(double value) { weight_decay_ = value; }
  double get_bias_learning_rate_multiplier() const { return bias_learning_rate_; }
  double get_bias_weight_decay_multiplier() const { return bias_weight_decay_; }
  void set_bias_learning_rate_multiplier(double value) { bias_learning_rate_ = value; }
  void set_bias_weight_decay_multiplier(double value) { bias_weight_decay_ = value; }

  /// disable_bias() and enable_bias() may be called at any time. After the first pass they allocate new
  /// parameters with the same factors.
  bool bias_is_disabled() const { return !use_bias_; }
  void disable_bias() { set_bias(false); }
  /// The new bias is zero.
  void enable_bias() { set_bias(true); }

  /// All parameters, in the order given at the class. Empty before the first pass.
  const ::dlib::tensor& get_layer_params() const { return params_; }
  ::dlib::tensor& get_layer_params() { return params_; }
  /// Number of bias elements, the last ones of the parameters; 0 for a layer without bias.
  std::size_t bias_size() const {
    return params_.size() > 0 && use_bias_ ? static_cast<std::size_t>(out_) : 0;
  }

  /// The context for the layer's passes; see share_context. Without it, the layer makes a context of its own
  /// with one thread. A copy of the layer does not get this context.
  void set_context(std::shared_ptr<cpu_context> ctx) { work_.context = std::move(ctx); }
  /// Number of tensors that have been transposed between NCHW and NHWC so far.
  std::size_t layout_changes() const { return work_.layout_changes; }
  /// Releases the activation kept between forward and backward pass, and the context unless it is shared.
  void clean() {
    work_.inner = {};
    work_.inner_count = -1;
    if (work_.context.use_count() == 1) work_.context.reset();
  }

 protected:
  /// `rank`: the wanted rank, 0 for a quarter of the full one.
  explicit dlib_layer(long rank) : wanted_(rank) {}

  // Whether the layer has a bias; number of elements of `down` and of `up`; `up` as it is stored, [r][out].
  bool has_bias() const { return use_bias_; }
  index_t down_size() const { return in_ * rank_; }
  index_t up_size() const { return rank_ * out_; }
  tensor_view<const float, 2> stored_up() const { return {params_.host() + down_size(), {rank_, out_}}; }
  /// A view [out][r] of `up` as it is stored, [r][out], in a tensor of parameters.
  tensor_view<float, 2> up_of(float* params) const {
    return {params + down_size(), {out_, rank_}, {1, out_}};
  }
  /// The bias in the parameters, or nullptr for a layer without bias.
  const float* bias_data() const { return use_bias_ ? params_.host() + down_size() + up_size() : nullptr; }
  rank_policy wanted_rank() const {
    if (wanted_ == 0) return rank_ratio{0.25};
    return fixed_rank{wanted_};
  }

  /// Throws value_error if `number` is less than `least`, state_error if it differs from `now` although there
  /// are parameters.
  void check_can_change(const char* what, long number, long now, long least = 1) const {
    if (number < least) {
      throw_error<value_error>({"pufferfish dlib layer: ", number, " ", what, "; at least ", least});
    }
    if (number != now && params_.size() > 0) {
      throw_error<state_error>({"pufferfish dlib layer: ", what, " cannot change once there are parameters"});
    }
  }

  /// Allocates parameters for the factors of an out x in weight. rank = 0: the wanted rank. The elements are
  /// not initialized. Throws rank_error, naming `name`, unless 1 <= rank <= min(out, in).
  void allocate(const std::string& name, index_t out, index_t in, index_t rank = 0) {
    if (rank == 0) rank = choose_rank(wanted_rank(), out, in, {}, 0.0);
    check_rank(name, out, in, rank);
    in_ = in;
    out_ = out;
    rank_ = rank;
    params_.set_size(static_cast<long>(down_size() + up_size() + (use_bias_ ? out : 0)));
  }
  /// Fills each factor as dlib fills the weight of a layer with its numbers of inputs and outputs; the bias
  /// is 0.
  void randomize(index_t in, index_t out) {
    // dlib's layers seed their random numbers in this way, too.
    ::dlib::rand random(std::rand());
    const auto fill = [&](index_t first, index_t count, index_t both) {
      auto part = ::dlib::alias_tensor(count)(params_, static_cast<std::size_t>(first));
      ::dlib::randomize_parameters(part, static_cast<unsigned long>(both), random);
    };
    fill(0, down_size(), in + rank_);
    fill(down_size(), up_size(), rank_ + out);
    if (use_bias_) std::fill_n(params_.host() + down_size() + up_size(), out, 0.0F);
  }
  /// factorize_matrix, which also accepts ranks whose factors are larger than the matrix.
  static factors<float> factorize_weight(const tensor_view<const float, 2>& weight, const rank_policy& policy,
                                         const std::string& name) {
    factorize_options options;
    options.name = name;
    options.allow_growth = true;
    return factorize_matrix<float>(weight, policy, options);
  }
  /// Copies `up` and the bias (nullptr: none) to the parameters, which have been allocated.
  void take_up_and_bias(const factors<float>& made, const float* bias) {
    copy(tensor_view<const float, 2>(made.up), up_of(params_.host()));
    if (bias != nullptr) std::copy_n(bias, out_, params_.host() + down_size() + up_size());
  }
  void set_use_bias(bool use) { use_bias_ = use; }
  /// Removes the parameters: the next pass makes new ones.
  void forget() {
    params_.clear();
    in_ = out_ = rank_ = 0;
  }

  /// Copies the multipliers of a dense layer and, before there are parameters, whether it has a bias.
  template <class Dense>
  void take_options(const Dense& dense) {
    learning_rate_ = dense.get_learning_rate_multiplier();
    weight_decay_ = dense.get_weight_decay_multiplier();
    bias_learning_rate_ = dense.get_bias_learning_rate_multiplier();
    bias_weight_decay_ = dense.get_bias_weight_decay_multiplier();
    if (params_.size() == 0) use_bias_ = !dense.bias_is_disabled();
  }
  /// Reads the multipliers, and with `with_bias_mode` the flag of the bias, in the order in which dlib writes
  /// them.
  void read_options(std::istream& in, bool with_bias_mode) {
    ::dlib::deserialize(learning_rate_, in);
    ::dlib::deserialize(weight_decay_, in);
    ::dlib::deserialize(bias_learning_rate_, in);
    ::dlib::deserialize(bias_weight_decay_, in);
    use_bias_ = true;
    if (with_bias_mode) ::dlib::deserialize(use_bias_, in);
  }

  /// Writes the wanted rank, the options and the parameters.
  void write(std::ostream& out) const {
    ::dlib::serialize(static_cast<long>(wanted_), out);
    ::dlib::serialize(learning_rate_, out);
    ::dlib::serialize(weight_decay_, out);
    ::dlib::serialize(bias_learning_rate_, out);
    ::dlib::serialize(bias_weight_decay_, out);
    ::dlib::serialize(use_bias_, out);
    serialize(params_, out);
  }
  /// Throws dlib::serialization_error if the number of parameters does not match rank, out and inputs.
  void read(std::istream& in, index_t rank, index_t out, index_t inputs, const char* name) {
    wanted_ = read_long(in);
    read_options(in, true);
    ::dlib::resizable_tensor params;
    deserialize(params, in);
    const double expected =
        static_cast<double>(rank) * (static_cast<double>(out) + static_cast<double>(inputs)) +
        static_cast<double>(use_bias_ ? out : 0);
    const bool sound =
        rank >= 1 && rank <= std::min(out, inputs) && expected == static_cast<double>(params.size());
    if (wanted_ < 0 || (params.size() > 0 && !sound)) {
      throw ::dlib::serialization_error(std::string("Parameters of a wrong size found while deserializing "
                                                    "pufferfish::") +
                                        name + "_.");
    }
    if (params.size() == 0) return forget();
    in_ = inputs;
    out_ = out;
    rank_ = rank;
    params_ = params;
  }

  /// The options in the form of dlib's operator<<; print_xml writes them, and the parameters, as to_xml does.
  void print_options(std::ostream& out) const {
    out << " learning_rate_mult=" << learning_rate_ << " weight_decay_mult=" << weight_decay_;
    if (use_bias_) {
      out << " bias_learning_rate_mult=" << bias_learning_rate_
          << " bias_weight_decay_mult=" << bias_weight_decay_;
    } else {
      out << " use_bias=false";
    }
  }
  void print_xml(std::ostream& out, const char* tag) const {
    out << " learning_rate_mult='" << learning_rate_ << "' weight_decay_mult='" << weight_decay_
        << "' bias_learning_rate_mult='" << bias_learning_rate_ << "' bias_weight_decay_mult='"
        << bias_weight_decay_ << "' use_bias='" << (use_bias_ ? "true" : "false") << "'>\n"
        << ::dlib::mat(params_) << "</" << tag << ">\n";
  }

  /// The shared context, or one of this layer's own, made at the first call.
  cpu_context& context() {
    if (work_.context == nullptr) work_.context = std::make_shared<cpu_context>();
    return *work_.context;
  }
  /// Memory for the activation between the factors, valid until the next forward pass.
  float* inner(index_t count) {
    if (work_.inner.size() < count) work_.inner = aligned_buffer<float>(count, uninitialized);
    work_.inner_count = count;
    return work_.inner.data();
  }
  /// Throws state_error, naming `name`, unless the last forward pass kept an activation of `count` elements.
  const float* kept_inner(const std::string& name, index_t count) const {
    if (work_.inner_count != count) {
      PUFFERFISH_THROW(state_error(name + ": a backward pass without its forward pass"));
    }
    return work_.inner.data();
  }

  // NCHW and NHWC are the same memory for one channel or one pixel.
  static bool same_in_both(const extents<4>& nhwc) { return nhwc[3] == 1 || nhwc[1] * nhwc[2] == 1; }
  /// An NCHW tensor as NHWC: the same memory if both orders are equal, else a transposed copy in `frame`.
  tensor_view<const float, 4> to_nhwc(scratch_frame& frame, const float* nchw, const extents<4>& shape) {
    if (same_in_both(shape)) return {nchw, shape};
    const tensor_view<float, 4> images = frame.take<float>(shape);
    turn_images(context(), nchw, shape[0], shape[3], shape[1] * shape[2], images.data(), false);
    ++work_.layout_changes;
    return images;
  }
  /// Memory for an NHWC tensor that from_nhwc moves to `nchw`: `nchw` itself if both orders are the same,
  /// else scratch memory.
  static tensor_view<float, 4> place_nhwc(scratch_frame& frame, float* nchw, const extents<4>& shape) {
    return same_in_both(shape) ? tensor_view<float, 4>(nchw, shape) : frame.take<float>(shape);
  }
  /// Writes an NHWC tensor to NCHW memory, or with `add` adds it; does nothing if it was computed in place.
  void from_nhwc(const tensor_view<float, 4>& images, float* nchw, bool add) {
    if (images.data() == nchw) return;
    const extents<4>& shape = images.shape();
    turn_images(context(), images.data(), shape[0], shape[1] * shape[2], shape[3], nchw, add);
    ++work_.layout_changes;
  }

  ::dlib::resizable_tensor params_;

 private:
  // Members that a copy of a layer does not get: dlib's copies of a network may run in other threads.
  struct working_memory {
    std::shared_ptr<cpu_context> context;
    aligned_buffer<float> inner;
    index_t inner_count = -1;
    std::size_t layout_changes = 0;

    working_memory() = default;
    working_memory(const working_memory&) {}
    working_memory(working_memory&&) noexcept = default;
    working_memory& operator=(const working_memory& other) { return *this = working_memory(other); }
    working_memory& operator=(working_memory&&) noexcept = default;
    ~working_memory() = default;
  };

  // Keeps the factors. A new bias is zero.
  void set_bias(bool use) {
    if (use == use_bias_) return;
    use_bias_ = use;
    if (params_.size() == 0) return;
    const ::dlib::resizable_tensor before = params_;
    params_.set_size(static_cast<long>(down_size() + up_size() + (use ? out_ : 0)));
    params_ = 0;
    std::copy_n(before.host(), down_size() + up_size(), params_.host());
  }

  index_t wanted_, in_ = 0, out_ = 0, rank_ = 0;
  double learning_rate_ = 1, weight_decay_ = 1, bias_learning_rate_ = 1, bias_weight_decay_ = 0;
  bool use_bias_ = true;
  working_memory work_;
};

}  // namespace detail

PUFFERFISH_NAMESPACE_END
