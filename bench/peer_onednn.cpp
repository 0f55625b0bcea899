// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Competitor in bench/compare: oneDNN 2. Convolutions (one, or a factorized pair) forward and backward, by
// its direct and its Winograd algorithm, in its preferred layouts, without counting the time of reorders;
// matrix products by sgemm and by its matmul primitive.

#include <dnnl.hpp>

#include <CLI/CLI.hpp>

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

memory random_memory(const memory::desc& description, const dnnl::engine& engine) {
  memory result(description, engine);
  auto* const values = static_cast<float*>(result.get_data_handle());
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  const std::size_t count = description.get_size() / sizeof(float);
  for (std::size_t i = 0; i < count; ++i) values[i] = uniform(random);
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
        x_({c.batch, in, pixels, pixels}, memory::data_type::f32, memory::format_tag::any),
        w_({out, in, kernel, kernel}, memory::data_type::f32, memory::format_tag::any),
        y_({c.batch, out, output_pixels_, output_pixels_}, memory::data_type::f32, memory::format_tag::any),
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
    const dnnl::convolution_forward::desc description(dnnl::prop_kind::forward_training, a, x_, w_, y_,
                                                      stride_, padding_, padding_);
    return {description, engine_};
  }
  void make_forward(algorithm a) {
    const auto d = forward_description(a);
    forward_ = {dnnl::convolution_forward(d),
                {{DNNL_ARG_SRC, random_memory(d.src_desc(), engine_)},
                 {DNNL_ARG_WEIGHTS, random_memory(d.weights_desc(), engine_)},
                 {DNNL_ARG_DST, memory(d.dst_desc(), engine_)}}};
  }
  void make_backward_data(algorithm a) {
    const dnnl::convolution_backward_data::desc description(a, x_, w_, y_, stride_, padding_, padding_);
    const dnnl::convolution_backward_data::primitive_desc d(description, engine_, forward_description(a));
    backward_data_ = {dnnl::convolution_backward_data(d),
                      {{DNNL_ARG_DIFF_SRC, memory(d.diff_src_desc(), engine_)},
                       {DNNL_ARG_WEIGHTS, random_memory(d.weights_desc(), engine_)},
                       {DNNL_ARG_DIFF_DST, random_memory(d.diff_dst_desc(), engine_)}}};
  }
  void make_backward_weights(algorithm a) {
    const dnnl::convolution_backward_weights::desc description(a, x_, w_, y_, stride_, padding_, padding_);
    const dnnl::convolution_backward_weights::primitive_desc d(description, engine_, forward_description(a));
    backward_weights_ = {dnnl::convolution_backward_weights(d),
                         {{DNNL_ARG_SRC, random_memory(d.src_desc(), engine_)},
                          {DNNL_ARG_DIFF_WEIGHTS, memory(d.diff_weights_desc(), engine_)},
                          {DNNL_ARG_DIFF_DST, random_memory(d.diff_dst_desc(), engine_)}}};
  }

  const dnnl::engine& engine_;
  std::ptrdiff_t output_pixels_;
  memory::desc x_, w_, y_;
  dims stride_, padding_;
  std::optional<ready_primitive> forward_, backward_data_, backward_weights_;
  int winograd_passes_ = 0;
};

class services {
 public:
  answer run_conv(const request& asked) {
    const convolution c(asked);
    const bool winograd = asked.at("library").get<std::string>().find("Winograd") != std::string::npos;
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
    const auto matrix = [](std::ptrdiff_t rows, std::ptrdiff_t columns, tag layout) {
      return memory::desc({rows, columns}, memory::data_type::f32, layout);
    };
    const memory::desc a_desc = matrix(p.m, p.k, p.transposed ? tag::ba : tag::ab);
    const memory::desc b_desc = matrix(p.k, p.n, tag::ab), c_desc = matrix(p.m, p.n, tag::ab);
    memory a = random_memory(a_desc, engine_), b = random_memory(b_desc, engine_), c(c_desc, engine_);
    if (asked.at("library") == "oneDNN sgemm") {
      const auto values = [](const memory& m) { return static_cast<float*>(m.get_data_handle()); };
      return timed(asked, [&] {
        dnnl::sgemm(p.transposed ? 'T' : 'N', 'N', p.m, p.n, p.k, 1.0f, values(a), p.transposed ? p.m : p.k,
                    values(b), p.n, 0.0f, values(c), p.n);
      });
    }
    const dnnl::matmul::primitive_desc d(dnnl::matmul::desc(a_desc, b_desc, c_desc), engine_);
    const ready_primitive product{dnnl::matmul(d),
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
               "peer_onednn"};
  return examples::run_on_first(app, argc, argv, [&] {
    services s;
    serve({{"conv", [&s](const request& r) { return s.run_conv(r); }},
           {"gemm", [&s](const request& r) { return s.gemm(r); }}});
  });
}
