// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `low_rank_fc`: a fully connected layer of rank r as a computational layer of dlib.

#include <array>
#include <string>

#include <pufferfish/adapters/dlib_layer.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A fully connected layer of rank r as a dlib layer: y = up (down x) + b over the flattened samples.
/// Options, multipliers and defaults are those of dlib::fc_. Nothing is transposed or copied. Parameters:
/// `down` [in][r], then `up` [r][out], then the bias. See low_rank_con_ for a note on solvers.
///
///     using net_type = dlib::loss_multiclass_log<dlib::fc<10, dlib::relu<
///         pufferfish::low_rank_fc<120, 16, dlib::input<dlib::matrix<float>>>>>>;              // rank 16
template <unsigned long NumOutputs, long Rank, ::dlib::fc_bias_mode BiasMode>
class low_rank_fc_ : public detail::dlib_layer {
  static_assert(NumOutputs > 0, "pufferfish: low_rank_fc: at least one output");
  static_assert(Rank >= 0,
                "pufferfish: low_rank_fc: the rank is positive, or 0 for a quarter of the full one");

 public:
  /// The dense layer that this layer replaces.
  using dense_type = ::dlib::fc_<NumOutputs, BiasMode>;

  /// Throws value_error for 0 outputs.
  explicit low_rank_fc_(::dlib::num_fc_outputs o) : low_rank_fc_() {
    set_num_outputs(static_cast<long>(o.num_outputs));
  }
  /// Makes a layer without parameters. The first pass allocates them.
  low_rank_fc_() : dlib_layer(Rank) {
    if (BiasMode == ::dlib::FC_NO_BIAS) disable_bias();
  }
  /// Copies a dense layer's options and, if the dense layer has parameters, factorizes them. Throws the
  /// errors of factorize.
  low_rank_fc_(const dense_type& dense) : low_rank_fc_() {
    take_own_options(dense);
    out_ = static_cast<index_t>(dense.get_num_outputs());
    if (dense.get_layer_params().size() > 0) factorize(dense, wanted_rank(), "low_rank_fc");
  }

  /// Number of outputs, as in dlib::fc_.
  unsigned long get_num_outputs() const { return static_cast<unsigned long>(out_); }
  /// Allowed before the first pass only, else throws state_error; value_error unless num > 0.
  void set_num_outputs(long num) {
    check_can_change("outputs", num, static_cast<long>(out_));
    out_ = num;
  }
  /// Whether the type has a bias, as in dlib::fc_.
  ::dlib::fc_bias_mode get_bias_mode() const { return BiasMode; }
  /// Not available for a type without bias.
  void enable_bias() requires(BiasMode == ::dlib::FC_HAS_BIAS) { dlib_layer::enable_bias(); }
  /// Text for errors and logs: "low_rank_fc in -> rank -> out".
  std::string describe() const {
    return detail::message({"low_rank_fc ", in_, " -> ", rank(), " -> ", out_});
  }

  /// The factors in the frameworks' order of dimensions, down [r][in], up [out][r]: views of the parameters.
  tensor_view<float, 2> down() { return {params_.host(), {rank(), in_}, {1, rank()}}; }
  tensor_view<float, 2> up() { return up_of(params_.host()); }

  /// Sets the parameters to the best factors of a dense layer's weight, of the rank that the policy chooses,
  /// and to its bias; copies its options. Throws state_error for a dense layer without parameters, and the
  /// errors of factorize_matrix, but accepts ranks whose factors are larger than the weight.
  factor_report factorize(const dense_type& dense, const rank_policy& policy,
                          const std::string& name = "low_rank_fc") {
    factor_report report = take(layer_traits<dense_type>::matrices(dense)[0].view,
                                layer_traits<dense_type>::bias(dense).data(), policy, name);
    take_own_options(dense);
    return report;
  }

  /// Draws new factors, each from Glorot's distribution as dlib's layers do; the bias is 0. Throws rank_error
  /// if the rank exceeds the number of inputs or outputs.
  template <class Subnet>
  void setup(const Subnet& sub) {
    const ::dlib::tensor& x = sub.get_output();
    in_ = x.k() * x.nr() * x.nc();
    allocate(describe(), out_, in_);
    randomize(in_, out_);
  }

  /// output = up (down x) + b for each sample x of sub.get_output(), flattened. Resizes `output` to samples x
  /// outputs, and keeps the activation between the factors. Throws shape_error if the number of features
  /// differs from that of the first pass.
  template <class Subnet>
  void forward(const Subnet& sub, ::dlib::resizable_tensor& output) {
    const tensor_view<const float, 2> x = rows(sub.get_output());
    output.set_size(x.extent(0), static_cast<long>(out_));
    const tensor_view<float, 2> t(inner(x.extent(0) * rank()), {x.extent(0), rank()});
    const tensor_view<float, 2> y(output.host_write_only(), {x.extent(0), out_});
    ops::linear_forward<float>(context(), x, stored_down(), nullptr, t);
    ops::linear_forward<float>(context(), t, stored_up(), bias_data(), y);
  }

  /// Computes gradients from dy = gradient_input. Overwrites params_grad with the gradients of down, up and
  /// bias, unless the learning rate multiplier is 0, and adds the gradient of x to sub.get_gradient_input().
  /// Throws state_error without a forward pass for a batch of this size, shape_error if the number of
  /// features has changed.
  template <class Subnet>
  void backward(const ::dlib::tensor& gradient_input, Subnet& sub, ::dlib::tensor& params_grad) {
    const tensor_view<const float, 2> x = rows(sub.get_output());
    const tensor_view<const float, 2> dy(gradient_input.host(), {x.extent(0), out_});
    const tensor_view<const float, 2> t(kept_inner(describe(), x.extent(0) * rank()), {x.extent(0), rank()});
    cpu_context& ctx = context();
    scratch_frame frame(ctx.scratch());
    const tensor_view<float, 2> dt = frame.take<float>(t.shape());
    ops::linear_backward_input<float>(ctx, dy, stored_up(), dt);
    if (get_learning_rate_multiplier() != 0) {
      float* gradient = params_grad.host_write_only();
      ops::linear_backward_weight<float>(ctx, x, dt, {gradient, {in_, rank()}}, false);
      gradient += down_size();
      ops::linear_backward_weight<float>(ctx, t, dy, {gradient, {rank(), out_}}, false);
      if (has_bias()) ops::bias_gradient<float>(ctx, dy, gradient + up_size(), false);
    }
    const tensor_view<float, 2> dx(sub.get_gradient_input().host(), x.shape());
    ops::linear_backward_input<float>(ctx, dt, stored_down(), dx, true);
  }

  /// Writes sizes, rank, options and parameters, but neither context nor kept activation.
  friend void serialize(const low_rank_fc_& item, std::ostream& out) {
    using ::dlib::serialize;
    serialize(std::string("pufferfish_low_rank_fc_1"), out);
    for (const index_t number : {item.in_, item.out_, item.rank()}) serialize(static_cast<long>(number), out);
    item.write(out);
  }
  /// Reads a serialized low_rank_fc_, or a serialized dlib::fc_, which is then factorized with the rank that
  /// `item` has been constructed with or set to (set_rank). Throws dlib::serialization_error if the
  /// serialized version or bias mode is not that of the type, or if the number of parameters is wrong; for a
  /// dense layer also the errors of factorize.
  friend void deserialize(low_rank_fc_& item, std::istream& in) {
    using ::dlib::deserialize;
    std::string version;
    deserialize(version, in);
    if (version == "fc_2" || version == "fc_3") return item.read_dense(in, version == "fc_3");
    if (version != "pufferfish_low_rank_fc_1") item.refuse("Unexpected version '" + version + "' found");
    std::array<index_t, 3> numbers{};
    for (index_t& number : numbers) number = detail::read_long(in);
    item.read(in, numbers[2], numbers[1], numbers[0], "low_rank_fc");
    if (BiasMode == ::dlib::FC_NO_BIAS && item.has_bias()) item.refuse("Wrong fc_bias_mode found");
    item.in_ = numbers[0];
    item.out_ = numbers[1];
  }

  friend std::ostream& operator<<(std::ostream& out, const low_rank_fc_& item) {
    out << "low_rank_fc\t (num_outputs=" << item.out_ << ", rank=" << item.rank() << ")";
    item.print_options(out);
    return out;
  }
  friend void to_xml(const low_rank_fc_& item, std::ostream& out) {
    out << "<low_rank_fc num_outputs='" << item.out_ << "' rank='" << item.rank() << "'";
    item.print_xml(out, "low_rank_fc");
  }

 private:
  // Throws dlib::serialization_error.
  [[noreturn]] static void refuse(const std::string& what) {
    throw ::dlib::serialization_error(what + " while deserializing pufferfish::low_rank_fc_.");
  }
  // The samples of x as rows. Throws shape_error if they do not have in_ features.
  tensor_view<const float, 2> rows(const ::dlib::tensor& x) const {
    const extents<2> shape{x.num_samples(), x.k() * x.nr() * x.nc()};
    if (shape[1] != in_) {
      detail::throw_error<shape_error>({describe(), ": input ", detail::nhwc_extents(x), " (NHWC) has ",
                                        shape[1], " features, not ", in_});
    }
    return {x.host(), shape};
  }
  // `down` as it is stored, [in][r].
  tensor_view<const float, 2> stored_down() const { return {params_.host(), {in_, rank()}}; }
  // A type without bias stays without, whatever the dense layer's flag says.
  void take_own_options(const dense_type& dense) {
    take_options(dense);
    if (BiasMode == ::dlib::FC_NO_BIAS) disable_bias();
  }

  // Replaces sizes and parameters by the factors of `weight` (out x in, any strides) and by `bias` (out
  // elements, or nullptr). Returns the report of the factorization.
  factor_report take(const tensor_view<const float, 2>& weight, const float* bias, const rank_policy& policy,
                     const std::string& name) {
    const auto made = factorize_weight(weight, policy, name);
    out_ = weight.extent(0);
    in_ = weight.extent(1);
    set_use_bias(bias != nullptr);
    allocate(name, out_, in_, made.rank());
    copy(tensor_view<const float, 2>(made.down), down());
    take_up_and_bias(made, bias);
    return made.report;
  }

  // Reads what fc_'s serialize writes after its version.
  void read_dense(std::istream& in, bool with_bias_mode) {
    using ::dlib::deserialize;
    unsigned long outputs = 0, inputs = 0;
    ::dlib::resizable_tensor params;
    ::dlib::alias_tensor weights, biases;
    int mode = 0;
    deserialize(outputs, in);
    deserialize(inputs, in);
    deserialize(params, in);
    deserialize(weights, in);
    deserialize(biases, in);
    deserialize(mode, in);
    if (mode != static_cast<int>(BiasMode)) refuse("Wrong fc_bias_mode found");
    read_options(in, with_bias_mode);
    if (BiasMode == ::dlib::FC_NO_BIAS) disable_bias();
    out_ = static_cast<index_t>(outputs);
    const index_t features = static_cast<index_t>(inputs), size = static_cast<index_t>(params.size());
    if (size == 0) return forget();
    // A bias that was disabled after setup still occupies its elements of the parameters.
    if (out_ < 1 || features < 1 || size / out_ < features + (has_bias() ? 1 : 0)) {
      refuse("Parameters of a wrong size found");
    }
    take({params.host(), {out_, features}, {1, out_}}, has_bias() ? params.host() + features * out_ : nullptr,
         wanted_rank(), "low_rank_fc");
  }

  index_t in_ = 0, out_ = NumOutputs;
};

/// A layer of a dlib network type: low_rank_fc_ with a bias. low_rank_fc_no_bias has no bias.
template <unsigned long NumOutputs, long Rank, class Subnet>
using low_rank_fc = ::dlib::add_layer<low_rank_fc_<NumOutputs, Rank, ::dlib::FC_HAS_BIAS>, Subnet>;
template <unsigned long NumOutputs, long Rank, class Subnet>
using low_rank_fc_no_bias = ::dlib::add_layer<low_rank_fc_<NumOutputs, Rank, ::dlib::FC_NO_BIAS>, Subnet>;

PUFFERFISH_NAMESPACE_END
