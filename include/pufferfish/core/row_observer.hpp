// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// `row_observer`: a callback for the rows that training passes multiply weights with, and for the gradients
/// of the products, called while these rows are in memory.
///
/// \code
/// struct counter final : row_observer {
///   index_t rows = 0;
///   void on_rows(const void*, row_kind kind, const shown_rows& seen) override {
///     if (kind == row_kind::output) rows += seen.rows;
///   }
/// };
/// counter seen;
/// const observed_scope scope(ctx, seen);  // until the end of the block
/// \endcode

#include <type_traits>

#include <pufferfish/core/scalar.hpp>
#include <pufferfish/core/view.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Role of rows with respect to the weight W of a layer y = W x + b.
enum class row_kind {
  input,            ///< rows x
  output,           ///< rows y, with the bias if there is one
  output_gradient,  ///< gradients of the loss with respect to the rows y
  token,            ///< indices of the columns of W used by a lookup: int32, one column
  tied_input        ///< rows h of an output layer W^T h that shares the weight of an embedding
};

/// Rows in the memory of a context's device; row i begins at data + i * stride elements.
/// The type of the elements is not part of the record: it is that of the layer's computation, int32 for
/// tokens.
struct shown_rows {
  const void* data = nullptr;
  index_t rows = 0;
  index_t columns = 0;
  index_t stride = 0;
};

/// Base class of observers, which observed_scope registers with a context. Layers call on_rows in training
/// passes only, on the thread of the pass: with outputs in the forward pass, before another layer can
/// overwrite them; with inputs, tokens and gradients in the backward pass. An observer must not modify the
/// rows or keep references to them.
class row_observer {
 public:
  /// Called by a layer with rows of the given role. `weight`: address of the parameter<T> that stores W.
  /// Elements have the type in which the layer computes; tokens are int32.
  virtual void on_rows(const void* weight, row_kind kind, const shown_rows& rows) = 0;

 protected:
  row_observer() = default;
  row_observer(const row_observer&) = default;
  row_observer& operator=(const row_observer&) = default;
  ~row_observer() = default;
};

/// Holds the row_observer that is registered with a context, or none. Layers call operator() of this object
/// for the rows of their training passes; it forwards the rows to the observer.
class observed_rows {
 public:
  /// The observer, or nullptr. It is not owned.
  row_observer* observer() const { return observer_; }
  void set_observer(row_observer* observer) { observer_ = observer; }

  template <class P, class T>
  void operator()(const P& weight, row_kind kind, const tensor_view<const T, 2>& rows) const {
    if (observer_ == nullptr) return;
    observer_->on_rows(&weight, kind, {rows.data(), rows.extent(0), rows.extent(1), rows.stride(0)});
  }

 private:
  row_observer* observer_ = nullptr;
};

/// Registers an observer with a context for the lifetime of the scope, then restores the previous one.
/// Context and observer must outlive the scope. Only for the thread that runs the context's passes.
template <class Context>
class observed_scope {
 public:
  /// Sets the observer of `ctx`; the destructor restores the one before. Both arguments must outlive the
  /// object.
  observed_scope(Context& ctx, row_observer& observer) : ctx_(ctx), before_(ctx.rows().observer()) {
    ctx.rows().set_observer(&observer);
  }
  ~observed_scope() { ctx_.rows().set_observer(before_); }
  observed_scope(const observed_scope&) = delete;
  observed_scope& operator=(const observed_scope&) = delete;

 private:
  Context& ctx_;
  row_observer* before_;
};

PUFFERFISH_NAMESPACE_END
