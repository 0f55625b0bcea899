// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// All compressors of the library.

#include <pufferfish/compress/accordion.hpp>
#include <pufferfish/compress/atomo.hpp>
#include <pufferfish/compress/block_top_k.hpp>
#include <pufferfish/compress/dgc.hpp>
#include <pufferfish/compress/entry_atomo.hpp>
#include <pufferfish/compress/one_bit.hpp>
#include <pufferfish/compress/power_sgd.hpp>
#include <pufferfish/compress/qsgd.hpp>
#include <pufferfish/compress/random_k.hpp>
#include <pufferfish/compress/sign_codec.hpp>
#include <pufferfish/compress/signum.hpp>
#include <pufferfish/compress/stochastic_binary.hpp>
#include <pufferfish/compress/tern_grad.hpp>
#include <pufferfish/compress/top_k.hpp>
#include <pufferfish/compress/two_hop_signum.hpp>
#include <pufferfish/dist/compression_options.hpp>
