// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `transformer_decoding`: translation token by token. Each source sentence is encoded once, and
/// keys and values of the tokens decoded so far are cached.
///
///     transformer_decoding decoding(ctx, net.root(), source, beam, max_length);
///     auto results = beam_search<float>(ctx, sentences, vocabulary, options,
///         [&](const beam_rows& r, const tensor_view<float, 2>& logits) {
///           decoding.step(ctx, r.tokens, r.parents, r.sentences, logits);
///         });

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <pufferfish/models/transformer.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// State of the hypotheses of a batch of sentences during decoding. The object refers to the transformer,
/// which must outlive it unchanged. All arguments of step but the logits are stored on the host, whatever the
/// device.
///
/// Memory is allocated for keys and values of the source tokens and of sentences * beam * tokens decoded
/// tokens, in each layer of the decoder. A step computes one token per row; its attention reads all tokens
/// decoded so far. One thread at a time may use an object. Steps throw state_error in training mode.
template <class T, class Device>
class transformer_decoding {
 public:
  /// Encodes the sentences (batch x length, padded), with room for `beam` hypotheses per sentence of up to
  /// `tokens` tokens. The context must be in inference mode, here and in step (else state_error). Throws the
  /// errors of transformer::forward, and shape_error if `beam` or `tokens` is below 1, or `tokens` above the
  /// positions.
  transformer_decoding(context<Device>& ctx, const transformer<T, Device>& net, const token_matrix& source,
                       index_t beam, index_t tokens)
      : net_(&net), sentences_(source.extent(0)) {
    net.encoding_.require_length(tokens);
    if (beam < 1 || tokens < 1) {
      detail::throw_error<shape_error>(
          {net.describe(), ": decoding ", beam, " hypotheses of ", tokens, " tokens: both must be positive"});
    }
    require_inference(ctx);
    scratch_frame frame(ctx.scratch());
    detail::check_sentences(net, net.encoding_, "source", source);
    detail::block_layout layout;
    const detail::token_packing packing(sentences_, detail::count_tokens(source, net.options_.padding), true,
                                        layout);
    auto* const block = frame.take<std::byte>(layout.bytes());
    detail::upload_written(ctx, block, layout.bytes(), [&](std::byte* here) {
      packing.write(here, source, net.options_.padding, 0, net.options_.positions);
      const token_runs runs = packing.in(here).runs;
      first_.assign(runs.first, runs.first + sentences_);
      count_.assign(runs.count, runs.count + sentences_);
    });
    const packed_tokens packed = packing.in(block);
    const tensor_view<const T, 2> encoded = net.encode(ctx, frame, packed);
    for (const detail::decoder_layer<T, Device>& layer : net.decoder_) {
      const attention_shape& shape = layer.enc_attn.shape();
      keys_.emplace_back(memory_of<Device>::source(), packed.rows() * shape.key_width(), uninitialized);
      values_.emplace_back(memory_of<Device>::source(), packed.rows() * shape.value_width(), uninitialized);
      rows_ = packed.rows();
      layer.enc_attn.project(ctx, encoded, matrix(keys_.back()), matrix(values_.back()));
      caches_.emplace_back(sentences_ * beam, tokens, shape.key_width(), shape.value_width());
      caches_.back().start(sentences_);
    }
  }

  /// Number of tokens of every hypothesis.
  index_t length() const { return caches_.front().length(); }
  /// Number of rows (hypotheses) of the most recent step; before the first step, the number of sentences.
  index_t rows() const { return caches_.front().rows(); }

  /// Extends hypotheses by one token: row i continues row parents[i] of the previous step (in the
  /// first step: of the sentences) by tokens[i]; sentences[i] is the index of its sentence. Writes
  /// the logits of the next token, rows x vocabulary with one row per token, in the memory of the
  /// device. Throws shape_error if the sizes differ, if rows or tokens exceed the reserved memory,
  /// or if a parent or sentence does not exist; value_error for a token outside the vocabulary.
  /// Rows may be duplicated, reordered and dropped by `parents`; their number may change from step to step,
  /// up to sentences * beam.
  void step(context<Device>& ctx, std::span<const std::int32_t> tokens, std::span<const std::int32_t> parents,
            std::span<const std::int32_t> sentences, const tensor_view<T, 2>& logits) {
    require_inference(ctx);
    check(tokens.size(), parents.size(), sentences, logits.shape());
    const transformer_options& o = net_->options_;
    ops::check_tokens(net_->describe() + ", target", tokens, o.vocabulary);
    const auto rows = static_cast<index_t>(tokens.size());
    scratch_frame frame(ctx.scratch());
    auto* const words = frame.take<std::int32_t>(2 * rows);  // tokens, then their positions
    auto* const runs = frame.take<index_t>(2 * rows);
    detail::upload_written(ctx, words, 2 * rows, [&](std::int32_t* here) {
      std::copy(tokens.begin(), tokens.end(), here);
      std::fill_n(here + rows, rows, static_cast<std::int32_t>(length()));
    });
    detail::upload_written(ctx, runs, 2 * rows, [&](index_t* here) {
      for (index_t i = 0; i < rows; ++i) {
        const auto sentence = static_cast<std::size_t>(sentences[static_cast<std::size_t>(i)]);
        here[i] = first_[sentence];
        here[rows + i] = count_[sentence];
      }
    });
    const token_runs memory_runs{rows, runs, runs + rows};
    packed_tokens packed;
    packed.tokens = {words, tokens.size()};
    packed.positions = words + rows;
    detail::stack_memory<T, Device> memory(ctx, frame, {rows, o.width});
    tensor_view<const T, 2> x = net_->embed(ctx, packed, net_->decoder_norm_, memory);
    for (std::size_t i = 0; i < caches_.size(); ++i) {
      const detail::decoder_layer<T, Device>& layer = net_->decoder_[i];
      caches_[i].reorder(ctx, parents);
      tensor_view<T, 2> y = memory.next();
      layer.slf_attn.step(ctx, x, caches_[i], y);
      x = y;
      y = memory.next();
      layer.enc_attn.attend(ctx, x, matrix(keys_[i]), matrix(values_[i]), memory_runs, y);
      x = y;
      y = memory.next();
      layer.pos_ffn.forward(ctx, x, y);
      x = y;
    }
    ops::output_logits<T>(ctx, net_->output_on(net_->embedding().output_rows(ctx, frame, x)), logits);
  }

 private:
  // Views a block as a matrix with one row per source token.
  tensor_view<T, 2> matrix(memory_block<T>& block) const {
    return {block.data(), {rows_, rows_ == 0 ? 0 : block.size() / rows_}};
  }
  // Throws state_error in training mode, in which the layers would write to the tape.
  void require_inference(const context<Device>& ctx) const {
    if (ctx.training()) detail::throw_error<state_error>({net_->describe(), ": decoding is for inference"});
  }
  // Throws shape_error for sizes that differ, a sentence that does not exist, and a token beyond the
  // reserved length.
  void check(std::size_t tokens, std::size_t parents, std::span<const std::int32_t> sentences,
             const extents<2>& logits) const {
    const auto rows = static_cast<index_t>(tokens);
    if (parents != tokens || sentences.size() != tokens || logits[0] != rows ||
        logits[1] != net_->options_.vocabulary) {
      detail::throw_error<shape_error>({net_->describe(), ": ", tokens, " tokens, ", parents, " parents, ",
                                        sentences.size(), " sentences, logits ", logits});
    }
    for (const std::int32_t sentence : sentences) {
      if (sentence < 0 || sentence >= sentences_) {
        detail::throw_error<shape_error>({net_->describe(), ": sentence ", sentence, " of ", sentences_});
      }
    }
    if (length() >= caches_.front().capacity()) {
      detail::throw_error<shape_error>({net_->describe(), ": token ", length() + 1, " of at most ",
                                        caches_.front().capacity(), " to decode"});
    }
  }

  const transformer<T, Device>* net_;
  index_t sentences_, rows_ = 0;
  std::vector<index_t> first_, count_;          // of each sentence: its first source token and their number
  std::vector<memory_block<T>> keys_, values_;  // of the source tokens, for each layer
  std::vector<key_value_cache<T, Device>> caches_;  // of the tokens decoded so far, for each layer
};

PUFFERFISH_NAMESPACE_END
