// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `low_rank_con`: a convolution of rank r as a computational layer of dlib.

#include <array>
#include <string>

#include <pufferfish/adapters/dlib_layer.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// A convolution of rank r as a dlib layer: y = up * (down * x) + b, where `down` has the geometry of
/// dlib::con_ with the same arguments and `up` is 1x1. Options, multipliers and defaults are those of con_.
///
/// dlib's tensors are NCHW, this library's kernels use NHWC. x and y of a forward pass, and x, dy and dx of a
/// backward pass are therefore transposed in scratch memory, except for images of one channel or one pixel,
/// where both layouts are equal. layout_changes() returns the number of tensors transposed so far. Parameters
/// are not transposed: dlib's tensor stores them in the kernels' order, `down` as [height][width][in][r],
/// then `up` as [r][out], then the bias. Between forward and backward pass the layer keeps the activation of
/// r channels; clean() releases it.
///
/// dlib's solvers treat a layer of a type unknown to them as one vector of weights. The bias multipliers take
/// effect only with `bias_solver` (dlib_solver.hpp); other solvers treat the bias as a weight.
///
/// The members that dlib calls (setup, forward, backward, serialize, ...) have the signatures of dlib's
/// computational layers. One thread at a time uses a layer.
///
///     using net_type = dlib::loss_multiclass_log<dlib::fc<10, dlib::relu<
///         pufferfish::low_rank_con<32, 8, 3, 3, 1, 1, dlib::input<dlib::matrix<float>>>>>>;   // rank 8
///     net_type net;
///     dlib::layer<3>(net).layer_details().set_rank(4);        // before the first pass
template <long NumFilters, long Rank, long Rows, long Cols, int StrideY, int StrideX,
          int PaddingY = StrideY != 1 ? 0 : static_cast<int>(Rows / 2),
          int PaddingX = StrideX != 1 ? 0 : static_cast<int>(Cols / 2)>
class low_rank_con_ : public detail::dlib_layer {
  static_assert(Rank >= 0,
                "pufferfish: low_rank_con: the rank is positive, or 0 for a quarter of the full one");

 public:
  /// The dense layer that this layer replaces.
  using dense_type = ::dlib::con_<NumFilters, Rows, Cols, StrideY, StrideX, PaddingY, PaddingX>;

  /// Throws value_error for 0 filters.
  explicit low_rank_con_(::dlib::num_con_outputs o) : low_rank_con_() {
    set_num_filters(static_cast<long>(o.num_outputs));
  }
  /// Makes a layer without parameters. The first pass allocates them.
  low_rank_con_() : dlib_layer(Rank) {
    shape_ = {0, NumFilters, {Rows, Cols}, {StrideY, StrideX}, {PaddingY, PaddingX}, {1, 1}};
  }
  /// Copies a dense layer's options and, if the dense layer has parameters, factorizes them. Throws the
  /// errors of factorize.
  low_rank_con_(const dense_type& dense) : low_rank_con_() {
    take_options(dense);
    shape_.out_channels = dense.num_filters();
    if (dense.get_layer_params().size() > 0) factorize(dense, wanted_rank(), "low_rank_con");
  }

  /// The geometry with dlib's names. For a kernel as large as its image, nr() and nc() are 0 before the first
  /// pass.
  long num_filters() const { return static_cast<long>(shape_.out_channels); }
  long nr() const { return static_cast<long>(shape_.kernel.height); }
  long nc() const { return static_cast<long>(shape_.kernel.width); }
  long stride_y() const { return StrideY; }
  long stride_x() const { return StrideX; }
  long padding_y() const { return static_cast<long>(shape_.padding.height); }
  long padding_x() const { return static_cast<long>(shape_.padding.width); }
  /// Allowed before the first pass only, else throws state_error; value_error unless num > 0.
  void set_num_filters(long num) {
    check_can_change("filters", num, num_filters());
    shape_.out_channels = num;
  }
  /// Text for errors and logs: "low_rank_con rank 8, ...", followed by the geometry.
  std::string describe() const {
    return detail::message({"low_rank_con rank ", rank(), ", ", shape_.describe()});
  }

  /// The factors in the frameworks' order of dimensions, down [r][in][height][width] and up [out][r]. They
  /// are views of the parameters, valid until these are replaced (setup, factorize, deserialize, enable_bias,
  /// disable_bias).
  tensor_view<float, 4> down() { return down_of(params_.host()); }
  tensor_view<float, 2> up() { return up_of(params_.host()); }
  /// The geometry of the dense layer; 0 input channels before the first pass.
  const conv_shape& shape() const { return shape_; }

  /// Sets the parameters to the best factors of a dense layer's weight, of the rank that the policy chooses,
  /// and to its bias; copies its options. Throws state_error for a dense layer without parameters, and the
  /// errors of factorize_matrix, but accepts ranks whose factors are larger than the weight.
  factor_report factorize(const dense_type& dense, const rank_policy& policy,
                          const std::string& name = "low_rank_con") {
    const conv_shape shape = layer_traits<dense_type>::shape(dense);
    const auto bias = layer_traits<dense_type>::bias(dense);
    factor_report report = take(shape, dense.get_layer_params().host(), bias.data(), policy, name);
    take_options(dense);
    return report;
  }

  /// Maps points between images as dlib's con_ does: map_input_to_output returns the output pixel whose
  /// window is centered at an input pixel, map_output_to_input the center of an output pixel's window.
  ::dlib::dpoint map_input_to_output(::dlib::dpoint p) const {
    p.x() = (p.x() + static_cast<double>(padding_x() - nc() / 2)) / static_cast<double>(stride_x());
    p.y() = (p.y() + static_cast<double>(padding_y() - nr() / 2)) / static_cast<double>(stride_y());
    return p;
  }
  ::dlib::dpoint map_output_to_input(::dlib::dpoint p) const {
    p.x() = p.x() * static_cast<double>(stride_x()) - static_cast<double>(padding_x() - nc() / 2);
    p.y() = p.y() * static_cast<double>(stride_y()) - static_cast<double>(padding_y() - nr() / 2);
    return p;
  }

  /// Draws new factors, each from Glorot's distribution as in dlib's layers; the bias is 0. Throws rank_error
  /// if the rank does not fit the input.
  template <class Subnet>
  void setup(const Subnet& sub) {
    const ::dlib::tensor& x = sub.get_output();
    shape_.in_channels = x.k();
    if (Rows == 0) shape_.kernel.height = x.nr();
    if (Cols == 0) shape_.kernel.width = x.nc();
    allocate(describe(), shape_.out_channels, shape_.patch());
    randomize(shape_.patch(), shape_.out_channels);
  }

  /// output = up * (down * x) + b for x = sub.get_output(). Resizes `output`, and keeps the activation
  /// between the factors. Throws shape_error if the channels or the size of x do not fit.
  template <class Subnet>
  void forward(const Subnet& sub, ::dlib::resizable_tensor& output) {
    const ::dlib::tensor& x = sub.get_output();
    const extents<4> input = detail::nhwc_extents(x), result = shape_.output(input, *this);
    output.set_size(result[0], result[3], result[1], result[2]);
    cpu_context& ctx = context();
    scratch_frame frame(ctx.scratch());
    const auto images = to_nhwc(frame, x.host(), input);
    const tensor_view<float, 4> t(inner(volume<4>(inner_of(result))), inner_of(result));
    const tensor_view<float, 4> y = place_nhwc(frame, output.host_write_only(), result);
    ops::low_rank_conv_forward<float>(ctx, down_shape(), images, params_.host(), stored_up(), bias_data(), t,
                                      y);
    from_nhwc(y, output.host_write_only(), false);
  }

  /// Computes gradients from dy = gradient_input. Overwrites params_grad with the gradients of down, up and
  /// bias, unless the learning rate multiplier is 0, and adds the gradient of x to sub.get_gradient_input().
  /// Throws state_error without a forward pass for a batch of this size.
  template <class Subnet>
  void backward(const ::dlib::tensor& gradient_input, Subnet& sub, ::dlib::tensor& params_grad) {
    const ::dlib::tensor& x = sub.get_output();
    const extents<4> input = detail::nhwc_extents(x), result = detail::nhwc_extents(gradient_input);
    cpu_context& ctx = context();
    scratch_frame frame(ctx.scratch());
    const auto dy = to_nhwc(frame, gradient_input.host(), result);
    const tensor_view<const float, 4> t(kept_inner(describe(), volume<4>(inner_of(result))),
                                        inner_of(result));
    const tensor_view<float, 4> dt = frame.take<float>(t.shape());
    // As in con_: with a learning rate multiplier of 0, parameter gradients are not written.
    const bool learns = get_learning_rate_multiplier() != 0;
    float* gradient = learns ? params_grad.host_write_only() : frame.take<float>(up_size());
    const tensor_view<float, 2> up_gradient(gradient + (learns ? down_size() : 0), stored_up().shape());
    ops::low_rank_conv_backward_up<float>(ctx, t, dy, stored_up(), up_gradient, false, dt);
    if (learns) {
      const auto images = to_nhwc(frame, x.host(), input);
      ops::conv_backward_weight<float>(ctx, down_shape(), images, dt, gradient, false);
      if (has_bias()) {
        ops::bias_gradient<float>(ctx, ops::detail::as_rows(dy), gradient + down_size() + up_size(), false);
      }
    }
    float* const target = sub.get_gradient_input().host();
    const tensor_view<float, 4> dx = place_nhwc(frame, target, input);
    ops::conv_backward_input<float>(ctx, down_shape(), dt, params_.host(), dx, dx.data() == target);
    from_nhwc(dx, target, true);
  }

  /// Writes geometry, rank, options and parameters, but neither context nor kept activation.
  friend void serialize(const low_rank_con_& item, std::ostream& out) {
    using ::dlib::serialize;
    serialize(std::string("pufferfish_low_rank_con_1"), out);
    for (const index_t number : item.geometry()) serialize(static_cast<long>(number), out);
    item.write(out);
  }
  /// Reads a serialized low_rank_con_, or a serialized dlib::con_, which is then factorized with the rank
  /// that `item` has been constructed or set to (set_rank). Throws dlib::serialization_error if the
  /// serialized version, kernel size or stride is not that of the type, or if the number of parameters is
  /// wrong; for a dense layer also the errors of factorize.
  friend void deserialize(low_rank_con_& item, std::istream& in) {
    using ::dlib::deserialize;
    std::string version;
    deserialize(version, in);
    if (version == "con_4" || version == "con_5") return item.read_dense(in, version == "con_5");
    if (version != "pufferfish_low_rank_con_1") item.refuse("Unexpected version '" + version + "' found");
    std::array<index_t, 9> numbers{};
    for (index_t& number : numbers) number = detail::read_long(in);
    const auto expected = low_rank_con_().geometry();
    // The strides, and the size of the filters unless the type leaves it open (0).
    const auto same = [&](std::size_t i) { return numbers[i] == expected[i]; };
    if (!same(4) || !same(5) || !((Rows == 0 || same(2)) && (Cols == 0 || same(3)))) {
      item.refuse("Wrong filter size or stride found");
    }
    const conv_shape shape{
        numbers[0], numbers[1], {numbers[2], numbers[3]}, {numbers[4], numbers[5]}, {numbers[6], numbers[7]},
        {1, 1}};
    item.read(in, numbers[8], numbers[1], shape.patch(), "low_rank_con");
    item.shape_ = shape;
  }

  friend std::ostream& operator<<(std::ostream& out, const low_rank_con_& item) {
    out << "low_rank_con\t (num_filters=" << item.num_filters() << ", rank=" << item.rank()
        << ", nr=" << item.nr() << ", nc=" << item.nc() << ", stride_y=" << StrideY
        << ", stride_x=" << StrideX << ", padding_y=" << item.padding_y()
        << ", padding_x=" << item.padding_x() << ")";
    item.print_options(out);
    return out;
  }
  friend void to_xml(const low_rank_con_& item, std::ostream& out) {
    out << "<low_rank_con num_filters='" << item.num_filters() << "' rank='" << item.rank() << "' nr='"
        << item.nr() << "' nc='" << item.nc() << "' stride_y='" << StrideY << "' stride_x='" << StrideX
        << "' padding_y='" << item.padding_y() << "' padding_x='" << item.padding_x() << "'";
    item.print_xml(out, "low_rank_con");
  }

 private:
  // Throws dlib::serialization_error.
  [[noreturn]] static void refuse(const std::string& what) {
    throw ::dlib::serialization_error(what + " while deserializing pufferfish::low_rank_con_.");
  }
  // The numbers that a file holds: channels in and out, kernel, stride, padding, rank.
  std::array<index_t, 9> geometry() const {
    return {shape_.in_channels,
            shape_.out_channels,
            shape_.kernel.height,
            shape_.kernel.width,
            StrideY,
            StrideX,
            shape_.padding.height,
            shape_.padding.width,
            rank()};
  }
  // The geometry of `down`: the layer's, with r output channels.
  conv_shape down_shape() const {
    conv_shape down = shape_;
    down.out_channels = rank();
    return down;
  }
  // NHWC extents of the activation between the factors.
  extents<4> inner_of(extents<4> output) const {
    output[3] = rank();
    return output;
  }
  // A view [r][in][height][width] of `down` as it is stored, [height][width][in][r].
  tensor_view<float, 4> down_of(float* params) const {
    const auto layout =
        logical_layout::kernel(rank(), shape_.in_channels, shape_.kernel.height, shape_.kernel.width);
    return {params, layout.shape, layout.strides};
  }

  // Replaces geometry and parameters by the factors of `weight` [out][in][height][width], contiguous, and by
  // `bias` (out elements, or nullptr). Returns the report of the factorization.
  factor_report take(const conv_shape& shape, const float* weight, const float* bias,
                     const rank_policy& policy, const std::string& name) {
    const auto made = factorize_weight({weight, {shape.out_channels, shape.patch()}}, policy, name);
    shape_ = shape;
    set_use_bias(bias != nullptr);
    allocate(name, shape.out_channels, shape.patch(), made.rank());
    const extents<4> oihw{rank(), shape.in_channels, shape.kernel.height, shape.kernel.width};
    copy(tensor_view<const float, 4>(made.down.data(), oihw), down_of(params_.host()));
    take_up_and_bias(made, bias);
    return made.report;
  }

  // Reads what con_'s serialize writes after its version.
  void read_dense(std::istream& in, bool with_bias_mode) {
    using ::dlib::deserialize;
    ::dlib::resizable_tensor params;
    ::dlib::alias_tensor filters, biases;
    deserialize(params, in);
    std::array<index_t, 7> numbers{};
    for (index_t& number : numbers) number = detail::read_long(in);
    deserialize(filters, in);
    deserialize(biases, in);
    read_options(in, with_bias_mode);
    const auto [out, rows, cols, stride_y, stride_x, padding_y, padding_x] = numbers;
    if (rows != Rows || cols != Cols || stride_y != StrideY || stride_x != StrideX || padding_y != PaddingY ||
        padding_x != PaddingX) {
      refuse("Wrong filter size, stride or padding found");
    }
    low_rank_con_ fresh;
    shape_ = fresh.shape_;
    shape_.out_channels = out;
    if (params.size() == 0) return forget();
    const index_t weights = static_cast<index_t>(filters.size());
    conv_shape shape = shape_;
    shape.in_channels = filters.k();
    shape.kernel = {filters.nr(), filters.nc()};
    if (shape.patch() * out != weights ||
        static_cast<index_t>(params.size()) != weights + (has_bias() ? out : 0)) {
      refuse("Parameters of a wrong size found");
    }
    take(shape, params.host(), has_bias() ? params.host() + weights : nullptr, wanted_rank(), "low_rank_con");
  }

  conv_shape shape_;
};

/// low_rank_con_ as a layer of a network type, with the arguments of dlib::con and the rank after the
/// filters.
template <long NumFilters, long Rank, long Rows, long Cols, int StrideY, int StrideX, class Subnet>
using low_rank_con = ::dlib::add_layer<low_rank_con_<NumFilters, Rank, Rows, Cols, StrideY, StrideX>, Subnet>;

PUFFERFISH_NAMESPACE_END
