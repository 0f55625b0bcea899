// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "../support/io_support.hpp"

#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <pufferfish/nn/containers/residual.hpp>
#include <pufferfish/nn/layers/activation.hpp>
#include <pufferfish/nn/layers/batch_norm.hpp>
#include <pufferfish/nn/layers/pooling.hpp>
#include <pufferfish/train/checkpoint.hpp>

using namespace pufferfish;
using namespace io_test;

namespace {

/// A dense network with everything that a file has to carry: kernels, matrices, biases, batch norm, a
/// shortcut.
template <class T>
network<T> make_net(index_t width = 8, index_t classes = 5, std::uint64_t seed = 1) {
  Sequential<T> branch, shortcut, net;
  branch.add("conv1", Conv<T>(conv_shape::square(width, 2 * width, 3, 2, 1)));
  branch.add("bn1", BatchNorm<T>(2 * width));
  branch.add("relu", ReLU<T>());
  branch.add("conv2", Conv<T>(conv_shape::square(2 * width, 2 * width, 3, 1, 1), true));
  shortcut.add(Conv<T>(conv_shape::square(width, 2 * width, 1, 2)));
  net.add("stem", Conv<T>(conv_shape::square(2, width, 3, 1, 1), true));
  net.add("block", Residual<T>(branch, shortcut));
  net.add("pool", GlobalAvgPool<T>());
  net.add("fc1", Linear<T>(2 * width, 12));
  net.add("fc2", Linear<T>(12, classes));
  network<T> result{any_layer<T>(net)};
  result.initialize(seed);
  fill_uniform(result.store().buffers(), 0.5, 1.5, random_stream(seed, 77));
  return result;
}

template <class T>
bytes bytes_of(std::span<const T> values) {
  const auto* first = reinterpret_cast<const std::uint8_t*>(values.data());
  return {first, first + values.size_bytes()};
}

/// Everything that restore must not change where it fails: values, buffers, structure, generation.
template <class T>
struct snapshot {
  explicit snapshot(const network<T>& net)
      : values(bytes_of<T>(net.store().values())),
        buffers(bytes_of<T>(net.store().buffers())),
        structure(net.structure()),
        generation(net.generation()) {}
  bool same_numbers(const snapshot& other) const {
    return values == other.values && buffers == other.buffers && structure == other.structure;
  }
  friend bool operator==(const snapshot&, const snapshot&) = default;

  bytes values, buffers;
  std::string structure;
  std::uint64_t generation;
};

template <class T>
std::string restore_error(const checkpoint_file& file, network<T>& net,
                          const std::vector<named_state<T>>& states = {}) {
  const snapshot<T> before(net);
  std::vector<bytes> state_before;
  for (const auto& s : states) state_before.push_back(bytes_of<T>(s.values));
  const std::string text = io_error_of([&] { file.restore(net, states); });
  if (text.empty()) return text;
  CHECK(snapshot<T>(net) == before);
  for (std::size_t i = 0; i < states.size(); ++i) CHECK(bytes_of<T>(states[i].values) == state_before[i]);
  CHECK(mentions(text, file.name()));
  return text;
}

/// The tensors and metadata of a file, to be changed and written again.
struct editable {
  explicit editable(const std::string& path) : file(safetensors_file::read(path)), metadata(file.metadata()) {
    for (const std::string& name : file.tensor_names()) {
      const tensor_info& info = file.tensor(name);
      entries.push_back({name, info.dtype, info.shape, info.bytes});
    }
  }
  tensor_entry& at(const std::string& name) {
    return *std::find_if(entries.begin(), entries.end(), [&](const auto& e) { return e.name == name; });
  }
  void remove(const std::string& name) {
    std::erase_if(entries, [&](const tensor_entry& e) { return e.name == name; });
  }
  checkpoint_file parse() const { return parse_checkpoint(encode_safetensors(entries, metadata), "edited"); }
  std::string error() const {
    return io_error_of([&] { parse(); });
  }

  safetensors_file file;
  safetensors_metadata metadata;
  std::vector<tensor_entry> entries;
};

TEST_CASE_TEMPLATE("checkpoint: a dense network comes back bit for bit, with facts and state", T, float,
                   double) {
  const scratch_folder folder;
  const network<T> net = make_net<T>();
  std::vector<T> momentum(static_cast<std::size_t>(net.parameter_count()));
  fill_normal(std::span<T>(momentum), 1.0, random_stream(5, 5));
  momentum[3] = static_cast<T>(-0.0);
  const std::vector<named_state<T>> states{{"optimizer.momentum", momentum}};
  save_checkpoint(folder / "a", net, states, {{"epoch", "12"}, {"text", "line\n\"\xc3\xa9\""}});
  CHECK(list(folder.path()) == std::vector<std::string>{"a"});

  const checkpoint_file file = open_checkpoint(folder / "a");
  CHECK(file.facts().size() == 2);
  CHECK(file.fact("epoch") == "12");
  CHECK(file.fact("text") == "line\n\"\xc3\xa9\"");
  CHECK(mentions(io_error_of([&] { file.fact("phase"); }), "'phase'"));
  CHECK(file.library_version() == PUFFERFISH_VERSION_STRING);
  CHECK(file.ranks().empty());
  CHECK(file.stored_size("optimizer.momentum") == net.parameter_count());
  CHECK_THROWS_AS(file.stored_size("optimizer.variance"), io_error);

  network<T> other = make_net<T>(8, 5, 2);
  REQUIRE(!snapshot<T>(other).same_numbers(snapshot<T>(net)));
  const std::uint64_t generation = other.generation();
  const T* arena = other.store().values().data();
  std::vector<T> back(momentum.size());
  const std::vector<named_state<T>> wanted{{"optimizer.momentum", back}};
  file.restore(other, wanted);
  CHECK(snapshot<T>(other).same_numbers(snapshot<T>(net)));
  CHECK(bytes_of<T>(back) == bytes_of<T>(momentum));
  CHECK(other.generation() == generation);
  CHECK(other.store().values().data() == arena);

  // State is not asked for: a model for inference.
  network<T> model = make_net<T>(8, 5, 3);
  file.restore(model);
  CHECK(snapshot<T>(model).same_numbers(snapshot<T>(net)));
}

TEST_CASE("checkpoint: parameters have the order of frameworks in the file") {
  const scratch_folder folder;
  network<float> net = make_net<float>();
  save_checkpoint(folder / "a", net);
  const safetensors_file file = safetensors_file::read(folder / "a");
  CHECK(file.tensor("block.conv1.weight").shape == std::vector<index_t>{16, 8, 3, 3});
  CHECK(file.tensor("block.shortcut.0.weight").shape == std::vector<index_t>{16, 8, 1, 1});
  CHECK(file.tensor("fc1.weight").shape == std::vector<index_t>{12, 16});
  CHECK(file.tensor("fc1.bias").shape == std::vector<index_t>{12});
  CHECK(file.tensor("block.bn1.running_var").shape == std::vector<index_t>{16});
  net.for_each_layer([&](const std::string& name, const any_layer<float>& layer) {
    if (const auto* conv = layer.target<Conv<float>>()) {
      tensor<float, 4> stored(conv->weight().shape());
      read_tensor<float>(file, name + ".weight", stored.flat());
      for (index_t o = 0; o < stored.extent(0); ++o) {
        CHECK(stored(o, 1, 0, 0) == conv->weight()(o, 1, 0, 0));
        CHECK(stored(o, 0, stored.extent(2) - 1, 0) == conv->weight()(o, 0, stored.extent(2) - 1, 0));
      }
    }
    if (const auto* linear = layer.target<Linear<float>>()) {
      tensor<float, 2> stored(linear->weight().shape());
      read_tensor<float>(file, name + ".weight", stored.flat());
      CHECK(stored(1, 5) == linear->weight()(1, 5));
    }
  });
}

TEST_CASE("checkpoint: a hybrid network into a dense one, which is factorized on the way") {
  const scratch_folder folder;
  network<float> net = make_net<float>();
  factorize_policy policy;
  policy.first_layer = 2;
  const factorization made = factorize(net, policy);
  REQUIRE(made.layers.size() == 3);
  std::vector<float> momentum(static_cast<std::size_t>(net.parameter_count()), 0.5F);
  const std::vector<named_state<float>> states{{"optimizer.momentum", momentum}};
  save_checkpoint(folder / "a", net, states);

  const checkpoint_file file = open_checkpoint(folder / "a");
  CHECK(file.ranks() == std::vector<layer_rank>{{"block.conv1", 4}, {"block.conv2", 4}, {"fc1", 3}});
  const auto& names = file.tensor_names();
  CHECK(std::find(names.begin(), names.end(), "block.conv2.up.bias") != names.end());

  network<float> other = make_net<float>(8, 5, 9);
  const std::uint64_t generation = other.generation();
  std::vector<float> back(static_cast<std::size_t>(file.stored_size("optimizer.momentum")));
  file.restore(other, std::vector<named_state<float>>{{"optimizer.momentum", back}});
  CHECK(snapshot<float>(other).same_numbers(snapshot<float>(net)));
  CHECK(other.generation() > generation);
  CHECK(back == momentum);
  cpu_context ctx;
  tensor<float, 4> x({2, 6, 6, 2});
  fill_normal(x.flat(), 1.0, random_stream(1, 2));
  const tensor<float, 4> y = net.forward(ctx, x.view()), z = other.forward(ctx, x.view());
  CHECK(std::equal(y.flat().begin(), y.flat().end(), z.flat().begin()));

  // Into a network with other ranks, and with the right ones already: then nothing moves.
  network<float> differently = make_net<float>(8, 5, 10);
  apply_ranks(differently, {{"block.conv2", 2}, {"fc2", 1}});
  file.restore(differently);
  CHECK(snapshot<float>(differently).same_numbers(snapshot<float>(net)));
  network<float> ready = make_net<float>(8, 5, 11);
  apply_ranks(ready, file.ranks());
  const float* arena = ready.store().values().data();
  file.restore(ready);
  CHECK(ready.store().values().data() == arena);
  CHECK(snapshot<float>(ready).same_numbers(snapshot<float>(net)));
}

TEST_CASE("checkpoint: a merged network is a dense one, also for a network that is factorized") {
  const scratch_folder folder;
  network<double> net = make_net<double>();
  factorize(net, factorize_policy{});
  merge(net);
  save_checkpoint(folder / "a", net);
  const checkpoint_file file = open_checkpoint(folder / "a");
  CHECK(file.ranks().empty());
  network<double> dense = make_net<double>(8, 5, 4), hybrid = make_net<double>(8, 5, 5);
  factorize(hybrid, factorize_policy{});
  file.restore(dense);
  file.restore(hybrid);
  CHECK(snapshot<double>(dense).same_numbers(snapshot<double>(net)));
  CHECK(snapshot<double>(hybrid).same_numbers(snapshot<double>(net)));
}

TEST_CASE("checkpoint: saving the same twice gives the same bytes") {
  const scratch_folder folder;
  network<float> net = make_net<float>();
  save_checkpoint(folder / "a", net, {}, {{"epoch", "1"}});
  const network<float> copy = net;
  save_checkpoint(folder / "b", copy, {}, {{"epoch", "1"}});
  CHECK(read_file(folder / "a") == read_file(folder / "b"));
}

TEST_CASE("checkpoint: refused networks are named and stay as they are") {
  const scratch_folder folder;
  network<float> net = make_net<float>();
  factorize(net, factorize_policy{});
  std::vector<float> momentum(static_cast<std::size_t>(net.parameter_count()), 1.0F);
  save_checkpoint(folder / "a", net, std::vector<named_state<float>>{{"optimizer.momentum", momentum}});
  const checkpoint_file file = open_checkpoint(folder / "a");

  network<float> wide = make_net<float>(12);
  CHECK(mentions(restore_error(file, wide), "is F32 [3 x 16] in the file, F32 [3 x 24] here"));
  network<float> other_classes = make_net<float>(8, 6);
  const std::string text = restore_error(file, other_classes);
  CHECK(mentions(text, "'fc2."));
  CHECK(mentions(text, "[5"));
  CHECK(mentions(text, "[6"));
  network<double> other_type = make_net<double>();
  CHECK(mentions(restore_error(file, other_type), "F32"));
  CHECK(mentions(restore_error(file, other_type), "F64"));

  Sequential<float> foreign;
  foreign.add("fc1", Linear<float>(16, 12));
  foreign.add("extra", Linear<float>(12, 3));
  network<float> other_model{any_layer<float>(foreign)};
  CHECK(mentions(restore_error(file, other_model), "no dense layer called block.conv1"));

  network<float> good = make_net<float>();
  std::vector<float> shorter(momentum.size() - 1), right(momentum.size());
  const std::string sizes = restore_error<float>(file, good, {{"optimizer.momentum", shorter}});
  CHECK(mentions(sizes, std::to_string(momentum.size())));
  CHECK(mentions(sizes, std::to_string(momentum.size() - 1)));
  const std::string unknown =
      restore_error<float>(file, good, {{"optimizer.momentum", right}, {"optimizer.other", right}});
  CHECK(mentions(unknown, "'optimizer.other'"));
  CHECK(restore_error<float>(file, good, {{"optimizer.momentum", right}}).empty());
  CHECK(right == momentum);
}

TEST_CASE("checkpoint: the same tensors in another order take the model but not the state") {
  const auto make = [](bool swapped) {
    Sequential<float> net;
    net.add(swapped ? "b" : "a", Linear<float>(3, 3));
    net.add(swapped ? "a" : "b", Linear<float>(3, 3));
    return network<float>{any_layer<float>(net)};
  };
  const scratch_folder folder;
  network<float> net = make(false), swapped = make(true);
  net.initialize(4);
  std::vector<float> state(24, 2.0F);
  save_checkpoint(folder / "a", net, std::vector<named_state<float>>{{"s", state}});
  const checkpoint_file file = open_checkpoint(folder / "a");
  CHECK(mentions(restore_error<float>(file, swapped, {{"s", state}}), "another order"));
  CHECK(restore_error(file, swapped).empty());
  CHECK(swapped.store().values()[0] == net.store().values()[12]);
}

TEST_CASE("checkpoint: missing, unexpected, misshapen and mistyped tensors") {
  const scratch_folder folder;
  network<float> net = make_net<float>();
  save_checkpoint(folder / "a", net);
  network<float> target = make_net<float>(8, 5, 2);
  {
    editable file(folder / "a");
    file.remove("fc1.bias");
    file.remove("block.bn1.running_mean");
    file.at("fc2.bias").name = "fc3.bias";
    const std::string text = restore_error(file.parse(), target);
    CHECK(mentions(text, "missing in the file: "));
    for (const char* name : {"'fc1.bias'", "'block.bn1.running_mean'", "'fc2.bias'"}) {
      CHECK(mentions(text, name));
    }
    CHECK(mentions(text, "unknown to the network: 'fc3.bias'"));
  }
  {
    editable file(folder / "a");
    file.at("fc1.weight").shape = {16, 12};
    const std::string text = restore_error(file.parse(), target);
    CHECK(mentions(text, "'fc1.weight' is F32 [16 x 12] in the file, F32 [12 x 16] here"));
  }
  {
    editable file(folder / "a");
    file.at("fc1.bias").dtype = tensor_dtype::i32;
    CHECK(mentions(restore_error(file.parse(), target), "'fc1.bias' is I32 [12] in the file, F32 [12] here"));
  }
  {
    editable file(folder / "a");
    file.at("fc1.bias").shape = {12, 1};
    CHECK(mentions(restore_error(file.parse(), target), "[12 x 1]"));
  }
  CHECK(restore_error(editable(folder / "a").parse(), target).empty());
}

TEST_CASE("checkpoint: hostile metadata") {
  const scratch_folder folder;
  network<float> net = make_net<float>();
  factorize(net, factorize_policy{});
  std::vector<float> state(7, 1.0F);
  save_checkpoint(folder / "a", net, std::vector<named_state<float>>{{"s", state}}, {{"epoch", "1"}});
  const editable good(folder / "a");
  CHECK(good.error().empty());
  for (const char* key : {"format", "version", "layout", "ranks", "states"}) {
    editable file(folder / "a");
    REQUIRE(file.metadata.erase(std::string("pufferfish.") + key) == 1);
    CHECK(mentions(file.error(), std::string("lack pufferfish.") + key));
  }
  const auto with = [&](const char* key, const std::string& value) {
    editable file(folder / "a");
    file.metadata[std::string("pufferfish.") + key] = value;
    return file;
  };
  CHECK(mentions(with("format", "2").error(), "format '2'"));
  for (const char* bad : {"", "[]", "7", "{", "{\"fc1\":3", "{\"fc1\":\"3\"}", "{\"fc1\":-3}",
                          "{\"fc1\":1.5}", "{\"fc1\":1e3}", "{\"fc1\":null}", "{\"fc1\":{}}", "{\"fc1\":[1]}",
                          "null", "{\"fc1\":1,\"fc1\":1}", "{\"fc1\":9223372036854775808}", "{\"a\":1}x"}) {
    CAPTURE(bad);
    CHECK(!with("ranks", bad).error().empty());
    CHECK(!with("states", bad).error().empty());
  }
  CHECK(mentions(with("states", "{\"s\":8}").error(), "8"));
  CHECK(mentions(with("states", "{\"t\":7}").error(), "'t'"));
  network<float> target = make_net<float>(8, 5, 2);
  // Claims that contradict the tensors, or that no matrix allows.
  for (const char* bad : {"{}", "{\"block.conv1\":4,\"block.conv2\":4,\"fc1\":4}", "{\"fc1\":3}",
                          "{\"block.conv1\":4,\"block.conv2\":4,\"fc1\":0}",
                          "{\"block.conv1\":4,\"block.conv2\":4,\"fc1\":9223372036854775807}",
                          "{\"block.conv1\":4,\"block.conv2\":4,\"fc1\":3,\"pool\":1}",
                          "{\"block.conv1\":4,\"block.conv2\":4,\"fc1\":3,\"absent\":1}"}) {
    CAPTURE(bad);
    CHECK(!restore_error(with("ranks", bad).parse(), target).empty());
  }
  // A parameter that is declared state, so that it would be read as both.
  CHECK(!restore_error(with("states", "{\"s\":7,\"fc2.bias\":5}").parse(), target).empty());
  CHECK(!restore_error(with("states", "{}").parse(), target).empty());
  CHECK(!restore_error<float>(with("layout", "1").parse(), target, {{"s", state}}).empty());
  CHECK(restore_error<float>(good.parse(), target, {{"s", state}}).empty());
}

TEST_CASE("checkpoint: files that are none, cut or damaged") {
  const scratch_folder folder;
  CHECK(mentions(io_error_of([&] { open_checkpoint(folder / "none"); }), folder / "none"));
  write_safetensors(folder / "plain", {}, {});
  CHECK(mentions(io_error_of([&] { open_checkpoint(folder / "plain"); }), "not a checkpoint"));

  Sequential<float> small;
  small.add("a", Linear<float>(3, 4));
  small.add("b", Linear<float>(4, 3));
  network<float> net{any_layer<float>(small)};
  net.initialize(1);
  apply_ranks(net, {{"a", 1}});
  std::vector<float> state(5, 1.0F);
  save_checkpoint(folder / "a", net, std::vector<named_state<float>>{{"s", state}}, {{"epoch", "1"}});
  const bytes good = read_file(folder / "a");
  network<float> target{any_layer<float>(small)};
  const auto load = [&](const bytes& data) {
    const checkpoint_file file = parse_checkpoint(data, "damaged");
    const snapshot<float> before(target);
    try {
      file.restore(target, std::vector<named_state<float>>{{"s", state}});
    } catch (const io_error&) {
      CHECK(snapshot<float>(target) == before);
      throw;
    }
    target = network<float>{any_layer<float>(small)};
  };
  CHECK_NOTHROW(load(good));
  CHECK(accepted_prefixes(good, load) == 0);
  // Damage within the numbers cannot be told from other numbers; most of this file is header.
  CHECK(refused_damaged(good, 1500, 3, load) > 700);
  CHECK(mentions(io_error_of([&] { open_checkpoint(folder / "a", good.size() - 1); }), "limit"));
}

TEST_CASE("checkpoint: a changed bit of a number is refused; a file without a digest is read") {
  const scratch_folder folder;
  const network<float> net = make_net<float>();
  std::vector<float> state(7, 1.0F);
  save_checkpoint(folder / "a", net, std::vector<named_state<float>>{{"s", state}});
  const bytes good = read_file(folder / "a");
  network<float> target = make_net<float>(8, 5, 2);
  // The file ends with numbers.
  for (const std::size_t from_end : {std::size_t{1}, std::size_t{2}, std::size_t{30}, std::size_t{1001}}) {
    bytes damaged = good;
    damaged[damaged.size() - from_end] ^= 4U;
    const std::string text = restore_error(parse_checkpoint(damaged, "damaged"), target);
    CHECK(mentions(text, "the file is damaged"));
  }
  editable old(folder / "a");
  CHECK(old.metadata.erase("pufferfish.digest") == 1);
  old.parse().restore(target);
  CHECK(snapshot<float>(target).same_numbers(snapshot<float>(net)));
}

TEST_CASE("checkpoint: what cannot be saved leaves the old file") {
  const scratch_folder folder;
  network<float> net = make_net<float>();
  save_checkpoint(folder / "a", net, {}, {{"epoch", "1"}});
  const bytes old = read_file(folder / "a");
  CHECK_THROWS_AS(save_checkpoint(folder / "a", net, {}, {{"pufferfish.format", "9"}}), value_error);
  std::vector<float> state(3);
  const std::vector<named_state<float>> clash{{"fc1.bias", state}}, twice{{"s", state}, {"s", state}};
  CHECK(mentions(io_error_of([&] { save_checkpoint(folder / "a", net, clash); }), "'fc1.bias' is taken"));
  CHECK(mentions(io_error_of([&] { save_checkpoint(folder / "a", net, twice); }), "'s' is taken"));
  CHECK(!io_error_of([&] { save_checkpoint(folder / "a", net, {}, {{"epoch", "\xff"}}); }).empty());
  CHECK(!io_error_of([&] { save_checkpoint(folder / "no/a", net); }).empty());

  network<float> large = make_net<float>(24, 5, 2);
  std::string text;
  {
    void (*const old_handler)(int) = ::signal(SIGXFSZ, SIG_IGN);
    rlimit limit{};
    ::getrlimit(RLIMIT_FSIZE, &limit);
    const rlimit before = limit;
    limit.rlim_cur = old.size();
    ::setrlimit(RLIMIT_FSIZE, &limit);
    text = io_error_of([&] { save_checkpoint(folder / "a", large); });
    ::setrlimit(RLIMIT_FSIZE, &before);
    ::signal(SIGXFSZ, old_handler);
  }
  CHECK(mentions(text, "too large"));
  CHECK(read_file(folder / "a") == old);
  CHECK(list(folder.path()) == std::vector<std::string>{"a"});
  network<float> again = make_net<float>(8, 5, 2);
  open_checkpoint(folder / "a").restore(again);
  CHECK(snapshot<float>(again).same_numbers(snapshot<float>(net)));
}

TEST_CASE(
    "checkpoint: a header of many states is refused in time that grows with its length, not its square") {
  const scratch_folder folder;
  network<float> net = make_net<float>();
  save_checkpoint(folder / "a", net);
  const auto clocks_for = [&](int count) {
    editable file(folder / "a");
    std::string states;
    for (int i = 0; i < count; ++i) {
      const std::string name = "state" + std::to_string(i);
      states += (states.empty() ? "{\"" : ",\"") + name + "\":0";
      file.entries.push_back({name, tensor_dtype::f32, {0}, {}});
    }
    file.metadata["pufferfish.states"] = states + "}";
    file.remove("stem.weight");
    const std::clock_t start = std::clock();
    const checkpoint_file many = file.parse();
    CHECK(many.states().size() == static_cast<std::size_t>(count));
    CHECK(mentions(restore_error<float>(many, net), "stem.weight"));
    return static_cast<double>(std::clock() - start);
  };
  // Ten times as many take ten times as long, not a hundred times, on a machine of any speed.
  const double few = clocks_for(10000);
  CHECK(clocks_for(100000) < 40.0 * few);
}

TEST_CASE("checkpoint: ranks of layers whose names look like the further ranks of others") {
  const std::vector<layer_rank> ranks{
      {"a", 3},      {"a:2", 4}, {"a:2:layer", 5},  {"a:hidden", 4},         {"b", 6, 7},
      {"b:2", 8, 9}, {"b:3", 8}, {"c:layer", 1, 2}, {"hidden:hidden", 2, 2}, {"q", 1, 2, 3, 4}};
  CHECK(detail::ranks_from_numbers(detail::numbers_of(ranks)) == ranks);
  // As versions before wrote an LSTM's second rank.
  CHECK(detail::ranks_from_numbers({{"rnn", 3}, {"rnn:hidden", 4}, {"fc", 2}}) ==
        std::vector<layer_rank>{{"rnn", 3, 4}, {"fc", 2}});
}

}  // namespace
