// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `jpeg_decoder`: JPEG files to RGB pixels, by libjpeg-turbo's TurboJPEG interface.

#include <turbojpeg.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// 8-bit image. The value of channel c (0 red, 1 green, 2 blue) in row i and column j is pixels[3 (i width +
/// j) + c].
struct rgb_image {
  index_t height = 0;
  index_t width = 0;
  std::vector<std::uint8_t> pixels;
};

/// Decodes JPEG images in memory. One thread at a time; it keeps its working memory from image to image.
/// \code
///   jpeg_decoder decoder;
///   rgb_image image;
///   // The name is for texts of errors, {1, 1} is the scale 1 / 1: the original size.
///   decoder.decode(read_file("cat.jpg"), "cat.jpg", {1, 1}, image);
/// \endcode
class jpeg_decoder {
 public:
  /// Files whose headers ask for more pixels are refused, because a few bytes could take all memory.
  static constexpr std::int64_t most_pixels = std::int64_t{1} << 28;

  /// numerator / denominator of the original size.
  using scale = tjscalingfactor;

  /// Throws backend_error without memory.
  jpeg_decoder() : handle_(tjInitDecompress()) {
    if (handle_ == nullptr) detail::throw_error<backend_error>({"jpeg_decoder: ", tjGetErrorStr2(nullptr)});
  }

  /// Returns {height, width} of an image, from its header. `name` (the file's path) is the first word of
  /// error texts. Throws io_error for bytes that are not a JPEG image or for more than most_pixels pixels.
  extents<2> size_of(std::span<const std::uint8_t> bytes, const std::string& name) {
    const header seen = header_of(bytes, name);
    return {seen.height, seen.width};
  }

  /// Returns the smallest scale n / 8, n = 1 .. 8, at which a part of height x width pixels of the file still
  /// has at least needed x needed pixels; 8 / 8 if none has. Decoding at a small scale saves most of the
  /// work.
  static scale scale_for(double height, double width, index_t needed) {
    int eighths = 8;
    const auto fits = [&](int n) { return std::min(height, width) * n / 8.0 >= static_cast<double>(needed); };
    while (eighths > 1 && fits(eighths - 1)) --eighths;
    return {eighths, 8};
  }

  /// Decodes a JPEG image to RGB into `image`. The image is scaled down by the factor `by` = {n, 8}, n in 1
  /// .. 8, during decoding, which is faster than decoding at full size. From a file of height x width pixels
  /// the result has ceil(height n / 8) x ceil(width n / 8) pixels. Grey and CMYK images are converted to RGB.
  /// The orientation in the file's metadata is ignored. `name` (the file's path) is the first word of error
  /// texts. Throws io_error for bytes that are not a JPEG image or are cut off, and for a file of more than
  /// most_pixels pixels before scaling.
  void decode(std::span<const std::uint8_t> bytes, const std::string& name, scale by, rgb_image& image) {
    const header seen = header_of(bytes, name);
    if (seen.harmless) bytes = repaired(bytes, seen.colors);
    const int width = TJSCALED(seen.width, by), height = TJSCALED(seen.height, by);
    const bool inks = seen.colors == TJCS_CMYK || seen.colors == TJCS_YCCK;
    std::vector<std::uint8_t>& target = inks ? inks_ : image.pixels;
    const std::size_t pixels = static_cast<std::size_t>(width) * static_cast<std::size_t>(height);
    target.resize(pixels * (inks ? 4 : 3));
    if (tjDecompress2(handle_.get(), bytes.data(), static_cast<unsigned long>(bytes.size()), target.data(),
                      width, 0, height, inks ? TJPF_CMYK : TJPF_RGB, TJFLAG_ACCURATEDCT) != 0) {
      check_harmless(name, "cannot be decoded");
      if (!has_end(bytes)) refuse({name, ": the image is cut off; replace the file or remove it"});
    }
    image.height = height;
    image.width = width;
    if (inks) take_inks(image, pixels);
  }

 private:
  // What tjDecompressHeader3 reports: extents in pixels, chroma subsampling, color space; and whether
  // check_harmless has accepted a message about the header.
  struct header {
    int width = 0, height = 0, sampling = 0, colors = 0;
    bool harmless = false;
  };
  struct closer {
    void operator()(void* handle) const { tjDestroy(handle); }
  };

  // Reads a header. Throws the io_error of size_of.
  header header_of(std::span<const std::uint8_t> bytes, const std::string& name) {
    header seen;
    if (tjDecompressHeader3(handle_.get(), bytes.data(), static_cast<unsigned long>(bytes.size()),
                            &seen.width, &seen.height, &seen.sampling, &seen.colors) != 0) {
      check_harmless(name, "not a JPEG image");
      seen.harmless = true;
    }
    // A file that ends before its image begins is not an error there.
    if (seen.width < 1 || seen.height < 1) refuse({name, ": not a JPEG image: it has no pixels"});
    if (std::int64_t{seen.width} * seen.height > most_pixels) {
      refuse({name, ": ", seen.height, " x ", seen.width, " pixels; at most ", most_pixels, " are read"});
    }
    return seen;
  }

  // The decoder reports what it could repair like an error, and its first message, the only one it keeps,
  // tells them apart: of an image that ends too early or has damaged data some pixels would be wrong.
  void check_harmless(const std::string& name, const char* what) {
    const std::string text = tjGetErrorStr2(handle_.get());
    for (const char* harmless :
         {"extraneous bytes", "unknown JFIF revision", "Unknown Adobe color transform"}) {
      if (text.find(harmless) != std::string::npos) return;
    }
    refuse({name, ": ", what, ": ", text, "; replace the file or remove it"});
  }

  // A failed decoder may keep parts of its file and take them for parts of the next one, so it is replaced.
  [[noreturn]] void refuse(std::initializer_list<detail::message_part> parts) {
    const std::string text = detail::message(parts);
    handle_.reset(tjInitDecompress());
    if (handle_ == nullptr) detail::throw_error<backend_error>({"jpeg_decoder: ", tjGetErrorStr2(nullptr)});
    detail::throw_error<io_error>({text});
  }

  // A copy of a file whose header gives no message, so that the decoder can report damaged data: bytes
  // between segments become padding, and versions and color transforms valid ones. `colors`: color space of
  // the header.
  std::span<const std::uint8_t> repaired(std::span<const std::uint8_t> bytes, int colors) {
    repaired_.assign(bytes.begin(), bytes.end());
    std::uint8_t* const file = repaired_.data();
    const auto is_segment = [file](std::size_t at, std::uint8_t marker, std::string_view name) {
      return file[at + 1] == marker && std::equal(name.begin(), name.end(), file + at + 4);
    };
    constexpr std::uint8_t padding = 0xff, app0 = 0xe0, app14 = 0xee, scan = 0xda, end = 0xd9;
    for (std::size_t at = 2; at + 16 <= repaired_.size();) {
      const std::uint8_t marker = file[at + 1];
      if (file[at] != padding) {
        file[at++] = padding;
      } else if (marker == 0) {
        file[at + 1] = padding;
        at += 2;
      } else if (marker == padding) {
        ++at;
      } else {
        if (marker == scan || marker == end) break;
        if (is_segment(at, app0, "JFIF")) file[at + 9] = 1;  // version 1.x
        // 0 is no transform. The decoder takes all other numbers as these.
        if (is_segment(at, app14, "Adobe") && file[at + 15] != 0) file[at + 15] = colors == TJCS_YCCK ? 2 : 1;
        const bool bare = marker == 1 || (marker >= 0xd0 && marker <= 0xd8);  // no length follows
        at += bare ? 2 : 2 + 256 * std::size_t{file[at + 2]} + file[at + 3];
      }
    }
    return repaired_;
  }
  // Whether the last scan of a file is followed by the marker of the image's end.
  static bool has_end(std::span<const std::uint8_t> bytes) {
    bool ends = false;
    for (std::size_t i = 0; i + 1 < bytes.size(); ++i) {
      if (bytes[i] == 0xff && (bytes[i + 1] == 0xda || bytes[i + 1] == 0xd9)) ends = bytes[i + 1] == 0xd9;
    }
    return ends;
  }

  // Programs store CMYK inverted: 255 is no ink. Red is then cyan times black, and so on.
  void take_inks(rgb_image& image, std::size_t pixels) const {
    image.pixels.resize(3 * pixels);
    for (std::size_t p = 0; p < pixels; ++p) {
      for (std::size_t c = 0; c < 3; ++c) {
        const unsigned product = unsigned{inks_[4 * p + c]} * inks_[4 * p + 3];
        image.pixels[3 * p + c] = static_cast<std::uint8_t>((product + 127) / 255);
      }
    }
  }

  std::unique_ptr<void, closer> handle_;
  std::vector<std::uint8_t> inks_;      // pixels of a CMYK image before their conversion
  std::vector<std::uint8_t> repaired_;  // the last file whose header gave a message
};

PUFFERFISH_NAMESPACE_END
