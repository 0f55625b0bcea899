// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Internal: checks a batch of sentence pairs for a Transformer, packs it on the host and uploads it.

#include <algorithm>
#include <cstddef>
#include <string>

#include <pufferfish/core/context.hpp>
#include <pufferfish/core/tokens.hpp>
#include <pufferfish/lowrank/layers/shape_check.hpp>
#include <pufferfish/models/packed_tokens.hpp>
#include <pufferfish/ops/copy/upload.hpp>

PUFFERFISH_NAMESPACE_BEGIN
namespace detail {

/// Writes `count` elements at `place`, in the memory of the device. write(buffer) fills a buffer on the host,
/// on the CPU `place` itself.
template <class V, class Device, class Write>
void upload_written(context<Device>& ctx, V* place, index_t count, Write&& write) {
  scratch_frame notes(ctx.host_scratch());
  V* const here = ops::upload_buffer(ctx, notes, place, count);
  write(here);
  ops::upload(ctx, here, place, count);
}

/// Throws shape_error unless `ids` is dense, value_error for a token outside the model's vocabulary.
template <class Model>
void check_ids(const Model& model, const char* what, const token_matrix& ids) {
  check_dense(model, what, ids);
  check_tokens([&] { return model.describe() + ", " + what; }, ids.flat(), model.options().vocabulary,
               model.options().padding);
}
/// Throws the errors of check_ids, and shape_error for a sentence that is longer than the table of positions.
template <class Model, class Encoding>
void check_sentences(const Model& model, const Encoding& encoding, const char* what,
                     const token_matrix& ids) {
  check_ids(model, what, ids);
  index_t longest = 0;
  for (index_t i = 0; i < ids.size(); ++i) {
    if (ids.data()[i] != model.options().padding) longest = std::max(longest, i % ids.extent(1) + 1);
  }
  encoding.require_length(longest);
}

/// A packed batch of sentence pairs in the memory of the device. For a batch that bring_pairs has packed,
/// `block` is the number of bytes of its block and `counted` the number of target tokens that count for the
/// loss; otherwise block is -1.
struct brought_pairs {
  packed_pairs pairs;
  index_t block = -1, counted = 0;
};

/// Checks a batch, packs it on the host and uploads it: in training to the tape, from which the model pops
/// `block` bytes, else to `frame`. source, target: batch x length; next: as for pair_packing::write. Throws
/// shape_error for sizes that differ, and the errors of check_sentences.
template <class Model, class Encoding, class Device>
brought_pairs bring_pairs(context<Device>& ctx, scratch_frame& frame, const Model& model,
                          const Encoding& encoding, const token_matrix& source, const token_matrix& target,
                          const token_matrix& next) {
  if (source.extent(0) != target.extent(0)) {
    throw_error<shape_error>(
        {model.describe(), ": source tokens ", source.shape(), ", target tokens ", target.shape()});
  }
  check_sentences(model, encoding, "source", source);
  check_sentences(model, encoding, "target", target);
  const auto& options = model.options();
  const pair_packing packing(source, target, options.padding);
  const index_t bytes = packing.bytes();
  auto* const block =
      ctx.training() ? ctx.tape().template push<std::byte>(bytes) : frame.template take<std::byte>(bytes);
  index_t counted = 0;
  upload_written(ctx, block, bytes, [&](std::byte* here) {
    counted =
        packing.write(here, source, target, next, options.padding, ctx.first_sample(), options.positions);
  });
  return {packing.in(block), bytes, counted};
}

}  // namespace detail
PUFFERFISH_NAMESPACE_END
