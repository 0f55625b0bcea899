// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// Gradients of weights in a second stream: the order of work, and the bits of runs that use one stream.
#include "training_support.hpp"

#include <stdexcept>

#include <pufferfish/gpu/kernels/overlap.hpp>

using namespace gpu_test;

namespace {

using pf::device::gpu;

constexpr pf::gpu::context_options in_two_streams{.parallel_gradients = true};
constexpr index_t side = 5;
constexpr pf::extents<2> square{side, side};

twin<float> matrix(std::uint64_t stream) { return random_twin<float>(side * side, stream); }
std::vector<float> product(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> c(a.size());
  for (std::size_t i = 0; i < side; ++i) {
    for (std::size_t j = 0; j < side; ++j) {
      for (std::size_t k = 0; k < side; ++k) c[i * side + j] += a[i * side + k] * b[k * side + j];
    }
  }
  return c;
}
void multiply(pf::gpu_context& ctx, twin<float>& a, twin<float>& b, twin<float>& c) {
  pf::gpu::multiply<float>(ctx, a.device_view(square), b.device_view(square), c.device_view(square));
}

/// The streams and the scratch memory of the two pieces of work.
struct places {
  cudaStream_t first = nullptr, second = nullptr;
  const void *first_scratch = nullptr, *second_scratch = nullptr;
};
places places_of(pf::gpu_context& ctx, bool independent = true) {
  places found;
  ctx.in_parallel(
      [&] {
        found.first = ctx.stream();
        found.first_scratch = &ctx.scratch();
      },
      [&] {
        found.second = ctx.stream();
        found.second_scratch = &ctx.scratch();
      },
      independent);
  return found;
}

// A whole run with a switch has the same bits in one stream and in two, launch by launch and captured.
template <class Case, class Options>
void check_runs(const Case& of, Options options) {
  pf::self comm;
  const outcome expected = whole_run<gpu>(of, comm, options);
  for (const bool captured : {false, true}) {
    CAPTURE(captured);
    options.captured_steps = captured;
    check_same(whole_run<gpu>(of, comm, options, in_two_streams), expected);
  }
}

}  // namespace

TEST_CASE("gpu parallel gradients: work before, beside and after") {
  pf::gpu_context ctx(in_two_streams);
  auto a = matrix(1), b = matrix(2), c = matrix(3), x = matrix(4), y = matrix(5), z = matrix(6),
       ab = matrix(7);
  const auto work = [&] {
    multiply(ctx, a, b, ab);
    ctx.in_parallel([&] { multiply(ctx, ab, c, x); }, [&] { multiply(ctx, c, ab, y); });
    multiply(ctx, x, y, z);
  };
  const std::vector<float> of_ab = product(a.host(), b.host());
  z.host() = product(product(of_ab, c.host()), product(c.host(), of_ab));
  SUBCASE("direct") { work(); }
  SUBCASE("captured") {
    work();  // allocates
    ctx.synchronize();
    z = twin<float>(z.host());
    pf::gpu::detail::stream_capture capture(ctx.stream());
    work();
    auto graph = capture.finish();
    CHECK(graph.operations() == 4);  // the four products alone
    graph.launch(ctx.stream());
    ctx.synchronize();
  }
  ctx.synchronize();
  CHECK(difference(z) < 1e-5);
}

TEST_CASE("gpu parallel gradients: when there are two streams, each with scratch memory of its own") {
  pf::gpu_context one, two(in_two_streams);
  CHECK_FALSE(one.parallel_gradients());
  CHECK(two.parallel_gradients());
  const auto is_apart = [](const places& p) {
    CHECK((p.first == p.second) == (p.first_scratch == p.second_scratch));
    return p.first != p.second;
  };
  CHECK_FALSE(is_apart(places_of(one)));
  CHECK(is_apart(places_of(two)));
  CHECK(places_of(two).second == two.stream());
  CHECK_FALSE(is_apart(places_of(two, false)));
  pf::gpu::kernels::overlap_launches(true);
  CHECK_THROWS_AS(places_of(two), pf::state_error);
  CHECK_FALSE(is_apart(places_of(one)));
  pf::gpu::kernels::overlap_launches(false);
  places inner;
  cudaStream_t outer = nullptr;
  two.in_parallel(
      [&] {
        inner = places_of(two);
        outer = two.stream();
      },
      [&] { CHECK(is_apart(places_of(two))); });
  CHECK_FALSE(is_apart(inner));
  CHECK(inner.first == outer);
}

TEST_CASE("gpu parallel gradients: exceptions; the context stays usable") {
  pf::gpu_context ctx(in_two_streams);
  const cudaStream_t main = ctx.stream();
  auto a = matrix(1), b = matrix(2), c = matrix(3);
  const auto multiplies = [&] { multiply(ctx, a, b, c); };
  const auto fails = [] { throw std::runtime_error("no"); };
  bool called = false;
  CHECK_THROWS_WITH_AS(ctx.in_parallel(fails, [&] { called = true; }), "no", std::runtime_error);
  CHECK_FALSE(called);
  CHECK(ctx.stream() == main);
  CHECK_THROWS_WITH_AS(ctx.in_parallel(multiplies, fails), "no", std::runtime_error);
  CHECK(ctx.stream() == main);
  ctx.synchronize();  // also for the work of the second stream
  CHECK(difference(c.fetched(), product(a.host(), b.host())) < 1e-5);
  // What broke a capture is thrown, not that the capture is broken.
  {
    pf::gpu::detail::stream_capture capture(main);
    CHECK_THROWS_WITH_AS(
        ctx.in_parallel([&] { pf::gpu::check(cudaDeviceSynchronize(), "the wait"); }, multiplies),
        doctest::Contains("the wait"), pf::backend_error);
  }
  ctx.in_parallel(multiplies, [] {});
  ctx.synchronize();
}

TEST_CASE("gpu parallel gradients: a wait within the work is for the work of both streams") {
  pf::gpu_context ctx(in_two_streams);
  auto a = matrix(1), b = matrix(2), c = matrix(3);
  std::vector<float> found(side * side);
  ctx.in_parallel(
      [&] {
        multiply(ctx, a, b, c);
        pf::gpu::check(cudaMemcpyAsync(found.data(), c.device_data(), found.size() * sizeof(float),
                                       cudaMemcpyDeviceToHost, ctx.stream()),
                       "cudaMemcpyAsync");
        ctx.synchronize();
        CHECK(difference(found, product(a.host(), b.host())) < 1e-5);
      },
      [] {});
}

TEST_CASE("gpu parallel gradients: costs of products are those of the context") {
  pf::gpu_context ctx(in_two_streams);
  ctx.blas().costs().launch = 123.0;
  ctx.in_parallel([&] { CHECK(ctx.blas().costs().launch == 123.0); }, [] {});
}

TEST_CASE("gpu parallel gradients: a gradient over the input waits for the weight's") {
  pf::gpu_context one, two(in_two_streams);
  const pf::conv_shape shape = pf::conv_shape::square(3, 4, 3, 1, 1);
  const pf::extents<4> in{2, 5, 6, 3}, out{2, 5, 6, 4};
  std::vector<std::vector<float>> found;
  for (pf::gpu_context* const ctx : {&one, &two}) {
    const pf::mode_scope<gpu> training(*ctx, pf::run_mode::training);
    pf::network<float, gpu> net{
        pf::any_layer<float, gpu>(pf::LowRankConv<float, pf::dynamic_rank>(shape, 2))};
    net.initialize(1);
    auto x = random_twin<float>(pf::volume<4>(in), 1), y = random_twin<float>(pf::volume<4>(out), 2),
         dy = random_twin<float>(y.size(), 3);
    ctx->begin_step(0);
    net.forward(*ctx, x.device_view(in), y.device_view(out));
    net.backward(*ctx, dy.device_view(out), x.device_view(in));
    ctx->synchronize();
    found.push_back(x.fetched());
    const std::span<float> all = net.store().gradients();
    pf::gpu::device_memory().to_host(found.emplace_back(all.size()).data(), all.data(), all.size_bytes());
  }
  CHECK(found[0] == found[2]);
  CHECK(found[1] == found[3]);
}

TEST_CASE("gpu parallel gradients: runs of images") {
  check_runs(image_case<>(), image_case<>::options());
  check_runs(image_case<pf::gpu::bf16>(), image_case<pf::gpu::bf16>::options());
}
TEST_CASE("gpu parallel gradients: a run of a language model") {
  check_runs(language_case<pf::gpu::bf16>(), language_case<pf::gpu::bf16>::options());
}
TEST_CASE("gpu parallel gradients: a run of a Transformer") {
  check_runs(translation_case(), translation_case::options());
}
