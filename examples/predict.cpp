// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Classifies images with a network that train_image_classifier --save wrote:
//   predict --model model.safetensors seven.pgm t10k-images-idx3-ubyte.gz --labels t10k-labels-idx1-ubyte.gz

#include <cmath>

#include "common/console.hpp"
#include "common/data.hpp"
#include "common/model_file.hpp"
#include "common/pnm.hpp"
#include "common/session.hpp"
#include "common/text.hpp"

namespace {

using namespace examples;

struct options {
  std::string model;
  std::vector<std::string> files;
  std::string labels;
  std::string json;
  index_t top = 3;
  bool all = false;
  int threads = 0;
};

/// The images of one file, and their labels if there are any.
struct batch_of_images {
  pufferfish::image_set set;
  bool labelled = false;
};

void check_extents(const std::string& file, const extents<4>& have, const extents<4>& want) {
  if (have[1] == want[1] && have[2] == want[2] && have[3] == want[3]) return;
  throw pufferfish::shape_error(format("%s: images of %td x %td x %td, the network takes %td x %td x %td",
                                       file.c_str(), have[1], have[2], have[3], want[1], want[2], want[3]));
}

batch_of_images from_idx(const std::string& file, std::span<const std::uint8_t> bytes) {
  pufferfish::idx_array idx = pufferfish::parse_idx(bytes, file);
  if (idx.extents.size() < 3) {
    throw pufferfish::io_error(file + ": " + std::to_string(idx.extents.size()) +
                               " IDX dimensions; images have 3 or 4");
  }
  batch_of_images result;
  result.set.count = idx.extents[0];
  result.set.height = idx.extents[1];
  result.set.width = idx.extents[2];
  result.set.channels = idx.extents.size() == 4 ? idx.extents[3] : 1;
  result.set.pixels = std::move(idx.values);
  return result;
}

/// Scales a picture so that its white becomes the white of the training images.
batch_of_images from_picture(const std::string& file, std::span<const std::uint8_t> bytes,
                             int pixel_maximum) {
  picture p = parse_pnm(bytes, file);
  for (std::uint8_t& v : p.pixels) {
    const int scaled = (std::min<int>(v, p.maximum) * pixel_maximum * 2 + p.maximum) / (2 * p.maximum);
    v = static_cast<std::uint8_t>(scaled);
  }
  batch_of_images result;
  result.set = {1, p.height, p.width, p.channels, 0, std::move(p.pixels), {}};
  return result;
}

batch_of_images from_cifar(const std::string& file, std::span<const std::uint8_t> bytes) {
  pufferfish::cifar_batch cifar = pufferfish::parse_cifar10(bytes, file);
  batch_of_images result;
  result.set = {static_cast<index_t>(cifar.labels.size()),
                32,
                32,
                3,
                10,
                std::move(cifar.pixels),
                std::move(cifar.labels)};
  result.labelled = true;
  return result;
}

/// Reads a file whose first bytes show its format: PGM or PPM, IDX, else CIFAR-10, each also in gzip.
batch_of_images read_images(const std::string& file, const model_card& card, const std::string& labels) {
  const std::vector<std::uint8_t> bytes = pufferfish::read_plain_or_gzip(file);
  const bool idx = bytes.size() >= 4 && bytes[0] == 0 && bytes[1] == 0 && bytes[2] == 8;
  // A CIFAR record may begin like an IDX file, so the length of the file decides.
  const bool cifar = !bytes.empty() && bytes.size() % 3073 == 0 && card.image == extents<4>{1, 32, 32, 3};
  batch_of_images images =
      is_pnm(bytes)   ? from_picture(file, bytes, card.pixel_maximum)
      : idx && !cifar ? from_idx(file, bytes)
      : cifar         ? from_cifar(file, bytes)
                      : throw pufferfish::io_error(file +
                                                   ": is neither IDX nor a PGM or PPM picture, and no CIFAR-10 "
                                                           "batch for a network of 32 x 32 x 3 images");
  pufferfish::image_set& set = images.set;
  set.classes = card.class_count();
  check_extents(file, {set.count, set.height, set.width, set.channels}, card.image);
  if (!labels.empty()) {
    pufferfish::detail::set_labels(set, pufferfish::read_idx(labels), labels);
    images.labelled = true;
  }
  set.labels.resize(static_cast<std::size_t>(set.count), 0);
  return images;
}

/// Softmax of a row of logits.
std::vector<double> probabilities(const float* logits, index_t classes) {
  std::vector<double> p(logits, logits + classes);
  const double largest = *std::max_element(p.begin(), p.end());
  double sum = 0.0;
  for (double& v : p) sum += v = std::exp(v - largest);
  for (double& v : p) v /= sum;
  return p;
}

/// Class probabilities of every image.
std::vector<std::vector<double>> classify(pufferfish::cpu_context& ctx, const pufferfish::network<float>& net,
                                          const model_card& card, const pufferfish::image_set& set) {
  std::vector<std::vector<double>> result;
  if (set.count == 0) return result;
  pufferfish::loader_options how;
  how.batch = 256;
  how.shuffle = false;
  how.normalize = card.normalize;
  pufferfish::loader source(set, how);
  const index_t room = source.max_local_batch();
  pufferfish::tensor<float, 4> images({room, set.height, set.width, set.channels});
  std::vector<std::int32_t> labels(static_cast<std::size_t>(room));
  for (index_t step = 0; step < source.steps_per_epoch(); ++step) {
    const index_t count = source.load(0, step, images.view(), std::span<std::int32_t>(labels)).count;
    const pufferfish::tensor<float, 4> logits = net.forward(ctx, images.view().slice(0, 0, count));
    const index_t classes = card.class_count();
    for (index_t i = 0; i < count; ++i) result.push_back(probabilities(logits.data() + i * classes, classes));
  }
  return result;
}

/// Classes, most probable first.
std::vector<std::size_t> ranking(const std::vector<double>& p) {
  std::vector<std::size_t> order(p.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return p[a] > p[b]; });
  return order;
}

nlohmann::ordered_json report(const options& o, const console& out, const model_card& card,
                              const std::string& file, const batch_of_images& images,
                              const std::vector<std::vector<double>>& results) {
  nlohmann::ordered_json entries = nlohmann::ordered_json::array();
  index_t correct = 0;
  const bool show = o.all || results.size() == 1;
  for (std::size_t i = 0; i < results.size(); ++i) {
    const std::vector<std::size_t> order = ranking(results[i]);
    std::string line = file + (results.size() > 1 ? format("[%zu]", i) : "") + ":";
    for (std::size_t k = 0; k < std::min(order.size(), static_cast<std::size_t>(o.top)); ++k) {
      line += format("  %s %.4f", card.classes[order[k]].c_str(), results[i][order[k]]);
    }
    if (show) out.line(line);
    entries.push_back({{"class", order[0]}, {"name", card.classes[order[0]]}, {"probabilities", results[i]}});
    if (!images.labelled) continue;
    entries.back()["label"] = images.set.labels[i];
    correct += images.set.labels[i] == static_cast<std::int32_t>(order[0]) ? 1 : 0;
  }
  nlohmann::ordered_json j{{"file", file}, {"count", results.size()}};
  std::string summary = format("%s: %zu images", file.c_str(), results.size());
  if (images.labelled && !results.empty()) {
    const double accuracy = 100.0 * static_cast<double>(correct) / static_cast<double>(results.size());
    j["accuracy"] = accuracy;
    summary += format(", %td right, accuracy %.2f %%", correct, accuracy);
  }
  if (images.labelled || !show) out.line(summary);
  j["images"] = std::move(entries);
  return j;
}

void predict(const options& o) {
  const console out(0, o.json, progress_style::none);
  const auto loaded = load_model(o.model);
  const model_card& card = loaded.second;
  if (!o.labels.empty() && o.files.size() != 1) {
    throw pufferfish::value_error("--labels goes with one image file, not " + std::to_string(o.files.size()));
  }
  pufferfish::context_options machine;
  machine.threads = threads_for(o.threads, 1);
  pufferfish::cpu_context ctx(machine);
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const std::string& file : o.files) {
    const batch_of_images images = read_images(file, card, o.labels);
    files.push_back(report(o, out, card, file, images, classify(ctx, loaded.first, card, images.set)));
  }
  write_json(o.json, {{"model", card.model.name},
                      {"mode", card.mode},
                      {"parameters", loaded.first.parameter_count()},
                      {"low_rank_layers", pufferfish::low_rank_layers(loaded.first).size()},
                      {"classes", card.classes},
                      {"files", files}});
}

}  // namespace

int main(int argc, char** argv) {
  options o;
  CLI::App app("Classifies images with a trained network", "predict");
  app.option_defaults()->always_capture_default();
  app.add_option("--model", o.model, "File that train_image_classifier --save wrote")->required();
  app.add_option("files", o.files, "Images: IDX, CIFAR-10 batches, PGM, PPM; also in gzip")->required();
  app.add_option("--labels", o.labels, "IDX file with the right answers");
  app.add_option("--top", o.top, "Classes to show for an image")->check(CLI::Range(1, 1000));
  app.add_flag("--all", o.all, "Show every image of a set");
  app.add_option("--threads", o.threads, "Threads; 0: all cores")->check(CLI::Range(0, 4096));
  app.add_option("--json", o.json, "Write results to this file; - is standard output");
  return run_on_first(app, argc, argv, [&o] { predict(o); });
}
