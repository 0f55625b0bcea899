// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Labelled image sets in memory, read from the file layouts
/// of MNIST, Fashion-MNIST, CIFAR-10 and the bundled digits.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/io/cifar.hpp>
#include <pufferfish/io/error_text.hpp>
#include <pufferfish/io/idx.hpp>
#include <pufferfish/io/image_set.hpp>

PUFFERFISH_NAMESPACE_BEGIN

namespace detail {

/// `path` or `path`.gz, whichever exists (first the plain one). Throws io_error if neither exists.
inline std::string find_plain_or_gzip(const std::string& path) {
  if (is_regular_file(path)) return path;
  if (is_regular_file(path + ".gz")) return path + ".gz";
  throw_error<io_error>({path, ": neither this file nor ", path, ".gz exists"});
}

/// Copies the labels of an IDX array into the set. Throws io_error unless `labels` has one dimension,
/// set.count elements, and values below set.classes. `path`: name of the file in errors.
inline void set_labels(image_set& set, const idx_array& labels, const std::string& path) {
  if (labels.extents.size() != 1) {
    throw_error<io_error>(
        {path, ": labels need 1 dimension, the file has shape ", shape_text(labels.extents)});
  }
  if (labels.extents[0] != set.count) {
    throw_error<io_error>({path, ": ", labels.extents[0], " labels for ", set.count, " images"});
  }
  for (std::size_t i = 0; i < labels.values.size(); ++i) {
    if (labels.values[i] >= set.classes) {
      throw_error<io_error>({path, ": label ", i, " is ", labels.values[i], ", not in 0..", set.classes - 1});
    }
  }
  set.labels.assign(labels.values.begin(), labels.values.end());
}

}  // namespace detail

/// Loads two IDX files (plain or gzip): images [N x H x W] or [N x H x W x C], and labels [N] below
/// `classes`. The set has the file's pixels without scaling. A file of three dimensions has one channel. Each
/// file and its decompressed content may have up to default_read_limit bytes. Throws value_error for classes
/// < 1. Throws io_error for files that read_idx rejects, for other shapes, for unequal counts (both are
/// named) and for labels out of range.
/// \code
///   const image_set letters = load_idx_pair("images-idx3-ubyte.gz", "labels-idx1-ubyte.gz", 27);
/// \endcode
inline image_set load_idx_pair(const std::string& images_path, const std::string& labels_path,
                               index_t classes) {
  if (classes < 1) detail::throw_error<value_error>({"load_idx_pair: ", classes, " classes"});
  idx_array images = read_idx(images_path);
  const std::size_t rank = images.extents.size();
  if (rank < 3) {
    detail::throw_error<io_error>({images_path, ": images need 3 or 4 dimensions, the file has shape ",
                                   detail::shape_text(images.extents)});
  }
  const std::vector<index_t>& e = images.extents;
  image_set set{e[0], e[1], e[2], rank == 4 ? e[3] : 1, classes, {}, {}};
  detail::set_labels(set, read_idx(labels_path), labels_path);
  set.pixels = std::move(images.values);
  return set;
}

/// Loads a folder with the layout of MNIST: {train,t10k}-images-idx3-ubyte and
/// {train,t10k}-labels-idx1-ubyte, each plain or with ".gz". `train` selects the training or the test set.
/// Fashion-MNIST and the digits of this repository have the same layout. Throws the errors of load_idx_pair,
/// and io_error for a missing file.
/// \code
///   const image_set train = load_mnist_layout("data/mnist", true);
///   const image_set test = load_mnist_layout("data/mnist", false);
/// \endcode
inline image_set load_mnist_layout(const std::string& folder, bool train, index_t classes = 10) {
  const std::string stem = folder + "/" + (train ? "train" : "t10k");
  const std::string images = detail::find_plain_or_gzip(stem + "-images-idx3-ubyte");
  const std::string labels = detail::find_plain_or_gzip(stem + "-labels-idx1-ubyte");
  return load_idx_pair(images, labels, classes);
}

/// Loads the binary version of CIFAR-10 from a folder: data_batch_1.bin .. data_batch_5.bin in that order
/// (`train`), or test_batch.bin, each plain or with ".gz". The images have 32 x 32 pixels of 3 channels and
/// 10 classes, and are in the order of the files. A complete set has 50,000 (train) or 10,000 images, which
/// is not checked. Throws io_error for a missing file, and for contents that parse_cifar10 rejects.
inline image_set load_cifar10(const std::string& folder, bool train) {
  image_set set{0, 32, 32, 3, 10, {}, {}};
  for (int batch = 1; batch <= (train ? 5 : 1); ++batch) {
    const std::string name = train ? "data_batch_" + std::to_string(batch) : std::string("test_batch");
    const cifar_batch part = read_cifar10(detail::find_plain_or_gzip(folder + "/" + name + ".bin"));
    set.pixels.insert(set.pixels.end(), part.pixels.begin(), part.pixels.end());
    set.labels.insert(set.labels.end(), part.labels.begin(), part.labels.end());
  }
  set.count = static_cast<index_t>(set.labels.size());
  return set;
}

PUFFERFISH_NAMESPACE_END
