// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Competitor in bench/compare: oneDNN 2, or, compiled once more, oneDNN 3. Convolutions (one, or a factorized
// pair) forward and backward, by its direct and its Winograd algorithm, in its preferred layouts, without
// counting the time of reorders; matrix products by sgemm and by its matmul primitive. Convolutions and
// products of bfloat16 have sums and gradients of weights in float.

#include <dnnl.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <optional>
#include <random>
#include <unordered_map>

#include "../examples/common/session.hpp"
#include "common/line_server.hpp"

namespace {

using namespace bench;
using dnnl::algorithm;
using dnnl::memory;
using dims = memory::dims;
using data_type = memory::data_type;

/// Makes the description of a primitive, given the arguments of its operation, and then, for a gradient, the
/// description of the forward pass. Both versions take the same arguments; oneDNN 2 puts those of the
/// operation into a descriptor.
template <class Primitive, class... Arguments>
auto describe(const dnnl::engine& engine, const Arguments&... arguments) {
  return [&](const auto&... forward) {
#if DNNL_VERSION_MAJOR >= 3
    return typename Primitive::primitive_desc(engine, arguments..., forward...);
#else
    return typename Primitive::primitive_desc(typename Primitive::desc(arguments...), engine, forward...);
#endif
  };
}

/// Memory of random numbers in -1 .. 1, in float or bfloat16 (the upper half of a float's bits).
memory random_memory(const memory::desc& description, const dnnl::engine& engine, data_type type) {
  memory result(description, engine);
  std::mt19937 random(1);
  const auto fill = [&](auto* values, auto&& make) {
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    std::generate_n(values, description.get_size() / sizeof *values, [&] { return make(uniform(random)); });
  };
  void* const bytes = result.get_data_handle();
  if (type == data_type::f32) {
    fill(static_cast<float*>(bytes), [](float value) { return value; });
  } else {
    fill(static_cast<std::uint16_t*>(bytes),
         [](float value) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16); });
  }
  return result;
}

/// A primitive with memory for all its arguments.
struct ready_primitive {
  dnnl::primitive primitive;
  std::unordered_map<int, memory> arguments;
  void run(dnnl::stream& stream) const { primitive.execute(stream, arguments); }
};

/// A convolution without bias and its gradients. Direct where oneDNN has no Winograd form.
class conv {
 public:
  conv(const dnnl::engine& engine, const convolution& c, std::ptrdiff_t in, std::ptrdiff_t out,
       std::ptrdiff_t kernel, std::ptrdiff_t stride, std::ptrdiff_t padding, std::ptrdiff_t pixels,
       bool winograd)
      : engine_(engine),
        output_pixels_((pixels + 2 * padding - kernel) / stride + 1),
        type_(c.bf16 ? data_type::bf16 : data_type::f32),
        x_({c.batch, in, pixels, pixels}, type_, memory::format_tag::any),
        w_({out, in, kernel, kernel}, type_, memory::format_tag::any),
        dw_({out, in, kernel, kernel}, data_type::f32, memory::format_tag::any),
        y_({c.batch, out, output_pixels_, output_pixels_}, type_, memory::format_tag::any),
        stride_{stride, stride},
        padding_{padding, padding} {
    const bool try_winograd = winograd && kernel == 3 && stride == 1;
    make(try_winograd, [this](algorithm a) { make_forward(a); });
    make(try_winograd, [this](algorithm a) { make_backward_data(a); });
    make(try_winograd, [this](algorithm a) { make_backward_weights(a); });
  }

  void forward(dnnl::stream& stream) const { forward_->run(stream); }
  void backward(dnnl::stream& stream) const {
    backward_data_->run(stream);
    backward_weights_->run(stream);
  }
  std::ptrdiff_t output_pixels() const { return output_pixels_; }
  int winograd_passes() const { return winograd_passes_; }

 private:
  template <class Make>
  void make(bool try_winograd, Make&& make_with) {
    if (try_winograd) {
      try {
        make_with(algorithm::convolution_winograd);
        ++winograd_passes_;
        return;
      } catch (const dnnl::error&) {
      }
    }
    make_with(algorithm::convolution_direct);
  }

  dnnl::convolution_forward::primitive_desc forward_description(algorithm a) const {
    return describe<dnnl::convolution_forward>(engine_, dnnl::prop_kind::forward_training, a, x_, w_, y_,
                                               stride_, padding_, padding_)();
  }
  void make_forward(algorithm a) {
    const auto d = forward_description(a);
    forward_ = {dnnl::convolution_forward(d),
                {{DNNL_ARG_SRC, random_memory(d.src_desc(), engine_, type_)},
                 {DNNL_ARG_WEIGHTS, random_memory(d.weights_desc(), engine_, type_)},
                 {DNNL_ARG_DST, memory(d.dst_desc(), engine_)}}};
  }
  void make_backward_data(algorithm a) {
    const auto d = describe<dnnl::convolution_backward_data>(engine_, a, x_, w_, y_, stride_, padding_,
                                                             padding_)(forward_description(a));
    backward_data_ = {dnnl::convolution_backward_data(d),
                      {{DNNL_ARG_DIFF_SRC, memory(d.diff_src_desc(), engine_)},
                       {DNNL_ARG_WEIGHTS, random_memory(d.weights_desc(), engine_, type_)},
                       {DNNL_ARG_DIFF_DST, random_memory(d.diff_dst_desc(), engine_, type_)}}};
  }
  void make_backward_weights(algorithm a) {
    const auto d = describe<dnnl::convolution_backward_weights>(engine_, a, x_, dw_, y_, stride_, padding_,
                                                                padding_)(forward_description(a));
    backward_weights_ = {dnnl::convolution_backward_weights(d),
                         {{DNNL_ARG_SRC, random_memory(d.src_desc(), engine_, type_)},
                          {DNNL_ARG_DIFF_WEIGHTS, memory(d.diff_weights_desc(), engine_)},
                          {DNNL_ARG_DIFF_DST, random_memory(d.diff_dst_desc(), engine_, type_)}}};
  }

  const dnnl::engine& engine_;
  std::ptrdiff_t output_pixels_;
  data_type type_;
  memory::desc x_, w_, dw_, y_;
  dims stride_, padding_;
  std::optional<ready_primitive> forward_, backward_data_, backward_weights_;
  int winograd_passes_ = 0;
};

class services {
 public:
  /// The version, and its error text for each precision in which it has no Winograd algorithm for the forward
  /// pass of a 3x3 convolution.
  answer info(const request&) const {
    const auto* const version = dnnl::version();
    answer reply{{"version", std::to_string(version->major) + "." + std::to_string(version->minor)},
                 {"winograd_refused", answer::object()}};
    for (const auto& [precision, type] :
         {std::pair{"float", data_type::f32}, std::pair{"bfloat16", data_type::bf16}}) {
      const memory::desc image({128, 64, 16, 16}, type, memory::format_tag::any);
      const memory::desc weights({64, 64, 3, 3}, type, memory::format_tag::any);
      const dims ones{1, 1};
      try {
        describe<dnnl::convolution_forward>(engine_, dnnl::prop_kind::forward_training,
                                            algorithm::convolution_winograd, image, weights, image, ones,
                                            ones, ones)();
      } catch (const dnnl::error& e) {
        reply["winograd_refused"][precision] = e.message;
      }
    }
    return reply;
  }

  answer run_conv(const request& asked) {
    const convolution c(asked);
    const bool winograd = asked.at("library") == "Winograd";
    const bool backward = asked.value("directions", "all") != "forward";
    std::vector<conv> layers;
    layers.reserve(2);
    layers.emplace_back(engine_, c, c.in, c.rank > 0 ? c.rank : c.out, c.kernel, c.stride, c.padding,
                        c.pixels, winograd);
    if (c.rank > 0) layers.emplace_back(engine_, c, c.rank, c.out, 1, 1, 0, layers[0].output_pixels(), false);
    answer reply = timed(asked, [&] {
      for (const conv& layer : layers) layer.forward(stream_);
      for (const conv& layer : layers) {
        if (backward) layer.backward(stream_);
      }
      stream_.wait();
    });
    reply["winograd_passes"] = layers[0].winograd_passes();
    return reply;
  }

  answer gemm(const request& asked) {
    const product p(asked);
    using tag = memory::format_tag;
    const data_type type = p.bf16 ? data_type::bf16 : data_type::f32;
    const memory::desc a_desc({p.m, p.k}, type, p.transposed ? tag::ba : tag::ab),
        b_desc({p.k, p.n}, type, tag::ab);
    // A product with a transposed operand is a gradient of weights.
    const memory::desc c_desc({p.m, p.n}, p.transposed ? data_type::f32 : type, tag::ab);
    memory a = random_memory(a_desc, engine_, type), b = random_memory(b_desc, engine_, type),
           c(c_desc, engine_);
    if (asked.at("library") == "sgemm") {
      const auto values = [](const memory& m) { return static_cast<float*>(m.get_data_handle()); };
      return timed(asked, [&] {
        dnnl::sgemm(p.transposed ? 'T' : 'N', 'N', p.m, p.n, p.k, 1.0f, values(a), p.transposed ? p.m : p.k,
                    values(b), p.n, 0.0f, values(c), p.n);
      });
    }
    const ready_primitive product{dnnl::matmul(describe<dnnl::matmul>(engine_, a_desc, b_desc, c_desc)()),
                                  {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}}};
    return timed(asked, [&] {
      product.run(stream_);
      stream_.wait();
    });
  }

 private:
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Convolutions and matrix products of oneDNN for bench/compare; threads: OMP_NUM_THREADS",
               std::filesystem::path(argv[0]).filename().string()};
  return examples::run_on_first(app, argc, argv, [&] {
    services s;
    serve({{"info", [&s](const request& r) { return s.info(r); }},
           {"conv", [&s](const request& r) { return s.run_conv(r); }},
           {"gemm", [&s](const request& r) { return s.gemm(r); }}});
  });
}
