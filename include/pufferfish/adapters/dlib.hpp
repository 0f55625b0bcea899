// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

/// \file
/// For programs that train with dlib (19.24): `low_rank_con` and `low_rank_fc`, layers of rank r that replace
/// `con` and `fc` and run this library's kernels; the factorization of trained networks; and
/// `distributed_solver`, for training on several ranks.
///
///     template <typename S> using features = dlib::max_pool<2, 2, 2, 2, dlib::relu<S>>;
///     using dense_net = dlib::loss_multiclass_log<dlib::fc<10, dlib::fc<120, features<
///         dlib::con<32, 5, 5, 1, 1, features<dlib::con<16, 5, 5, 1, 1, input>>>>>>;
///     low_rank_twin<dense_net> twin(trained);   // con and fc are factorized, all else is copied
///     // The same with an explicit type: the rank is the second argument; 0 is a quarter of the full rank.
///     using small_net = dlib::loss_multiclass_log<dlib::fc<10, pufferfish::low_rank_fc<120, 0, features<
///         pufferfish::low_rank_con<32, 0, 5, 5, 1, 1, features<dlib::con<16, 5, 5, 1, 1, input>>>>>>;
///     small_net small(trained);
///     auto other = pufferfish::factorize_network<small_net>(trained, pufferfish::energy_kept{0.9});
///
/// A twin also reads the file of a dense network: dlib::deserialize("dense.dat") >> small.

#include <cstddef>
#include <map>
#include <memory>
#include <typeindex>
#include <utility>
#include <vector>

#include <pufferfish/adapters/dlib_con.hpp>
#include <pufferfish/adapters/dlib_distributed.hpp>
#include <pufferfish/adapters/dlib_fc.hpp>
#include <pufferfish/adapters/dlib_solver.hpp>
#include <pufferfish/adapters/dlib_twin.hpp>

PUFFERFISH_NAMESPACE_BEGIN

/// Converts a trained network to its low-rank twin `LowRankNet`: a network type with the same layers, except
/// that some con and fc layers are low_rank_con and low_rank_fc. Their factors have the rank that the policy
/// chooses, whatever rank their type says; all other layers are copied. `reports`, if given, receives a
/// report for each low-rank layer, named "layer 3" for dlib::layer<3>(network). Throws the errors of
/// low_rank_con_::factorize. `dense` is not changed. Layers are matched by their position. A low-rank layer
/// whose counterpart is not a dense layer of the matching type stays as LowRankNet's constructor has made it.
/// Each layer is factorized twice: by that constructor and by the policy.
template <class LowRankNet, class DenseNet>
LowRankNet factorize_network(const DenseNet& dense, const rank_policy& policy,
                             std::vector<factor_report>* reports = nullptr) {
  LowRankNet net(dense);
  std::map<std::size_t, std::pair<std::type_index, const void*>> layers;
  ::dlib::visit_computational_layers(dense, [&](std::size_t i, const auto& layer) {
    layers.emplace(i, std::pair<std::type_index, const void*>(typeid(layer), &layer));
  });
  if (reports != nullptr) reports->clear();
  ::dlib::visit_computational_layers(net, [&](std::size_t i, auto& layer) {
    using layer_type = std::remove_cvref_t<decltype(layer)>;
    if constexpr (std::is_base_of_v<detail::dlib_layer, layer_type>) {
      using dense_type = typename layer_type::dense_type;
      const auto found = layers.find(i);
      if (found == layers.end() || found->second.first != std::type_index(typeid(dense_type))) return;
      const factor_report report = layer.factorize(*static_cast<const dense_type*>(found->second.second),
                                                   policy, detail::message({"layer ", i}));
      if (reports != nullptr) reports->push_back(report);
    }
  });
  return net;
}

/// Sets one context for all low-rank layers of a network, so that they share its threads and scratch memory.
/// Results do not depend on it. Afterwards only one thread at a time may use the network and anything else
/// that uses the context. Copies of the network start without it.
///
///     pufferfish::share_context(net, std::make_shared<pufferfish::cpu_context>(
///                                        pufferfish::context_options{.threads = 4}));
template <class Net>
void share_context(Net& net, const std::shared_ptr<cpu_context>& ctx) {
  ::dlib::visit_computational_layers(net, [&](auto& layer) {
    if constexpr (std::is_base_of_v<detail::dlib_layer, std::remove_cvref_t<decltype(layer)>>)
      layer.set_context(ctx);
  });
}

PUFFERFISH_NAMESPACE_END
