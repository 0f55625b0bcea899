// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// Names of the library that the headers of this folder use.

#include <pufferfish/core/error.hpp>
#include <pufferfish/core/message.hpp>
#include <pufferfish/core/view.hpp>
#include <pufferfish/io/error_text.hpp>
#include <pufferfish/io/utf8.hpp>

namespace examples {

using pufferfish::first_invalid_utf8;
using pufferfish::index_t;
using pufferfish::io_error;
using pufferfish::value_error;

namespace detail {

using pufferfish::detail::quote_name;
using pufferfish::detail::throw_error;
using pufferfish::detail::utf8_length;

}  // namespace detail
}  // namespace examples
