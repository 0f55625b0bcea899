// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// The data sets of the examples, by name.

#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/io/dataset.hpp>
#include <pufferfish/io/image_folder.hpp>

namespace examples {

struct data_set {
  std::string name;
  std::string folder;
  std::vector<std::string> classes;
  int pixel_maximum = 255;
  pufferfish::image_set train, test;                 // empty for a folder of JPEG files
  pufferfish::image_folder train_files, test_files;  // empty for all others
};

/// The data set of JPEG files: DATA/train/CLASS/*.jpg and DATA/val/CLASS/*.jpg, as ImageNet's.
inline constexpr const char* folder_set = "folder";

namespace data {

struct known_set {
  std::string name;
  std::vector<std::string> folders;  ///< below the data folder, besides the folder itself
  std::string first_file;
  std::vector<std::string> classes;
  int pixel_maximum;
};

inline const std::vector<known_set>& known_sets() {
  static const std::vector<std::string> digits{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"};
  static const std::vector<known_set> sets{
      {"digits", {"digits"}, "train-images-idx3-ubyte", digits, 16},
      {"mnist", {"mnist", "MNIST/raw"}, "train-images-idx3-ubyte", digits, 255},
      {"fashion-mnist",
       {"fashion-mnist", "FashionMNIST/raw"},
       "train-images-idx3-ubyte",
       {"T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag",
        "ankle boot"},
       255},
      {"cifar10",
       {"cifar10", "cifar-10-batches-bin"},
       "data_batch_1.bin",
       {"airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"},
       255},
  };
  return sets;
}

inline bool holds(const std::string& folder, const known_set& set) {
  const std::string file = folder + "/" + set.first_file;
  return ::access(file.c_str(), R_OK) == 0 || ::access((file + ".gz").c_str(), R_OK) == 0;
}

/// The folder of this program, with a slash at its end; empty if the system does not report it.
inline std::string program_folder() {
  std::string path(4096, '\0');
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size());
  path.resize(length > 0 ? static_cast<std::size_t>(length) : 0);
  return path.substr(0, path.rfind('/') + 1);
}

/// Folders to search without --data: those of the bundled sets, in the sources or in the folder that contains
/// the build folder.
inline std::vector<std::string> default_roots() {
  std::vector<std::string> roots;
#if defined(PUFFERFISH_SOURCE_DIR)
  roots.emplace_back(PUFFERFISH_SOURCE_DIR "/examples/data");
#endif
  roots.push_back(program_folder() + "../../examples/data");
  return roots;
}

inline std::string find_folder(const known_set& set, const std::string& root) {
  const std::vector<std::string> roots = root.empty() ? default_roots() : std::vector<std::string>{root};
  for (const std::string& candidate : roots) {
    for (const std::string& below : set.folders) {
      if (holds(candidate + "/" + below, set)) return candidate + "/" + below;
    }
    if (holds(candidate, set)) return candidate;
  }
  throw pufferfish::io_error(
      root.empty() ? set.name + " is not bundled: say where it is with --data"
                   : root + ": no " + set.name + " here: neither this folder nor its subfolder " +
                         set.folders.front() + " has " + set.first_file + " or " + set.first_file + ".gz");
}

/// Lists DATA/train and DATA/val. Throws io_error, and value_error unless both have the same classes.
inline data_set list_folders(const std::string& root) {
  if (root.empty()) throw pufferfish::value_error("--dataset folder: say where it is with --data");
  data_set set{folder_set, root, {}, 255, {}, {}, {}, {}};
  set.train_files = pufferfish::list_image_folder(root + "/train");
  set.test_files = pufferfish::list_image_folder(root + "/val");
  if (set.train_files.classes != set.test_files.classes) {
    throw pufferfish::value_error(root + ": train has " + std::to_string(set.train_files.classes.size()) +
                                  " classes, val " + std::to_string(set.test_files.classes.size()) +
                                  ", or their names differ");
  }
  set.classes = set.train_files.classes;
  return set;
}

}  // namespace data

/// The names that load_data accepts.
inline std::vector<std::string> data_set_names() {
  std::vector<std::string> names;
  for (const data::known_set& set : data::known_sets()) names.push_back(set.name);
  return names;
}

/// Loads a set from `root` or its subfolder of the set's name; the bundled digits need
/// no root. Throws io_error.
inline data_set load_data(const std::string& name, const std::string& root) {
  if (name == folder_set) return data::list_folders(root);
  for (const data::known_set& set : data::known_sets()) {
    if (set.name != name) continue;
    const std::string folder = data::find_folder(set, root);
    const bool cifar = name == "cifar10";
    data_set result{name, folder, set.classes, set.pixel_maximum, {}, {}, {}, {}};
    result.train =
        cifar ? pufferfish::load_cifar10(folder, true) : pufferfish::load_mnist_layout(folder, true);
    result.test =
        cifar ? pufferfish::load_cifar10(folder, false) : pufferfish::load_mnist_layout(folder, false);
    return result;
  }
  throw pufferfish::value_error("unknown data set " + name);
}

}  // namespace examples
