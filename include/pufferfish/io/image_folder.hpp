// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `list_image_folder`: a data set as a folder of classes, each a folder of image files (the layout of
/// ImageNet once it is unpacked). The files are listed, not read.

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/io/descriptor.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Files and their classes. File i is root + "/" + files[i] and belongs to class labels[i], whose name is
/// classes[labels[i]].
struct image_folder {
  std::string root;                  ///< the folder as passed to list_image_folder
  std::vector<std::string> classes;  ///< names of the folders below root, in the order of their bytes
  std::vector<std::string> files;    ///< by class, and within a class in the order of their bytes
  std::vector<std::int32_t> labels;  ///< class of each file

  /// Path of file i, which must be less than files.size().
  std::string path(std::size_t i) const { return root + "/" + files[i]; }
};

namespace detail {

/// Names in a folder, without those that begin with a dot, in the order of their bytes. Throws io_error if
/// the folder cannot be listed.
inline std::vector<std::string> names_in(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(::opendir(folder.c_str()), &::closedir);
  if (listing == nullptr) throw_system_error(folder, "cannot list the folder", errno);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* const entry = ::readdir(listing.get())) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
    errno = 0;
  }
  if (errno != 0) throw_system_error(folder, "cannot list the folder", errno);
  std::sort(names.begin(), names.end());
  return names;
}

/// Whether a name ends in one of the endings (lower case) and has further characters before the ending. The
/// case of the name does not matter.
inline bool has_ending(std::string_view name, const std::vector<std::string>& endings) {
  return std::any_of(endings.begin(), endings.end(), [name](const std::string& ending) {
    return name.size() > ending.size() &&
           std::equal(ending.begin(), ending.end(), name.end() - static_cast<std::ptrdiff_t>(ending.size()),
                      [](char a, char b) { return a == std::tolower(static_cast<unsigned char>(b)); });
  });
}

/// Whether a path names a folder or a link to one. False also if the path cannot be examined.
inline bool is_folder(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

}  // namespace detail

/// Lists root/CLASS/FILE for all folders CLASS below `root` and all of their files whose names end in one of
/// `endings` (lower case; compared in any case). Other names, names that begin with a dot, and deeper folders
/// are left out. Throws io_error if a folder cannot be listed, if there is no class, and for a class without
/// such a file, which it names. Two folders with the same classes have the same labels.
/// \code
///   const image_folder train = list_image_folder("imagenet/train");
///   std::printf("%zu images of %zu classes\n", train.files.size(), train.classes.size());
/// \endcode
inline image_folder list_image_folder(const std::string& root,
                                      const std::vector<std::string>& endings = {".jpg", ".jpeg"}) {
  image_folder found;
  found.root = root;
  for (std::string& name : detail::names_in(root)) {
    if (detail::is_folder(root + "/" + name)) found.classes.push_back(std::move(name));
  }
  if (found.classes.empty()) {
    detail::throw_error<io_error>({root, ": no folder below it; each class of images needs one"});
  }
  for (std::size_t c = 0; c < found.classes.size(); ++c) {
    const std::size_t before = found.files.size();
    for (const std::string& name : detail::names_in(root + "/" + found.classes[c])) {
      if (detail::has_ending(name, endings)) found.files.push_back(found.classes[c] + "/" + name);
    }
    if (found.files.size() == before) {
      std::string text;
      for (const std::string& ending : endings) text += (text.empty() ? "" : " or ") + ending;
      detail::throw_error<io_error>({root, "/", found.classes[c], ": no file whose name ends in ", text});
    }
    found.labels.resize(found.files.size(), static_cast<std::int32_t>(c));
  }
  return found;
}

PUFFERFISH_NAMESPACE_END
