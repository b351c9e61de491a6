#include "launch_plan.h"

#include <algorithm>
#include <stdexcept>

#include "attention/paged_attention_plan.h"
#include "attention/select_pages_plan.h"
#include "attention/select_tokens_plan.h"
#include "attention/store_kv_cache_plan.h"
#include "gemm/gemm_plan.h"
#include "linear_attention/gated_delta_rule_plan.h"
#include "linear_attention/mamba2_scan_plan.h"
#include "lora/add_lora_plan.h"
#include "norm/rms_norm_plan.h"
#include "quant/w8a8_gemm_plan.h"
#include "sampling/sample_plan.h"

namespace fastinfer {
namespace {

using cuda::Device;
using cuda::WeightFormat;

constexpr int64_t kMost = 1 << 22;  // the largest size: products of two, in tiles, stay within 32 bits

struct Policy {
  std::string op;
  std::vector<PlanSize> sizes;
  LaunchPlan (*plan)(const Sizes& sizes, const Device& device);
};

template <WeightFormat kFormat>
LaunchPlan plan_gemm(const Sizes& sizes, const Device& device) {
  const int64_t group = kFormat == WeightFormat::kDense ? 0 : sizes.at("group");
  if (group % cuda::kGemmBlockInputs != 0) throw std::invalid_argument("group must be a multiple of 32");
  const auto p = cuda::gemm_plan(kFormat, sizes.at("m"), sizes.at("n"), sizes.at("k"), group, device);
  return {
      .facts = {{"tile_tokens", p.tile.tokens},
                {"tile_rows", cuda::kGemmRows},
                {"chunk_inputs", p.tile.chunk},
                {"stages", p.stages},
                {"token_tiles", p.token_tiles},
                {"units", p.units},
                {"chunks_per_unit", p.chunks},
                {"workers", p.workers},
                {"whole_units", p.whole_units},
                {"chunks_per_worker", p.worker_chunks}},
      .workspace_bytes = static_cast<int64_t>(p.workspace_bytes),
      .launches = {{"gemm", p.launch}},
  };
}

LaunchPlan plan_w8a8_gemm(const Sizes& sizes, const Device& device) {
  const auto p = cuda::plan_w8a8_gemm(sizes.at("m"), sizes.at("n"), sizes.at("k"), device);
  return {
      .facts = {{"tile_tokens", p.tile.tokens},
                {"tile_rows", cuda::kW8a8Rows},
                {"chunk_inputs", p.tile.chunk},
                {"stages", p.tile.stages},
                {"token_tiles", p.token_tiles},
                {"units", p.units},
                {"chunks_per_unit", p.chunks},
                {"splits", p.splits},
                {"chunks_per_split", p.split_chunks}},
      .workspace_bytes = static_cast<int64_t>(p.workspace_ints * sizeof(int32_t)),
      .launches = {{"w8a8_gemm", p.launch}},
  };
}

LaunchPlan plan_paged_attention(const Sizes& sizes, const Device& device) {
  const auto p = cuda::plan_paged_attention(sizes.at("seqs"), sizes.at("head_dim"), device);
  return {
      .facts = {{"kv_tile", p.kv_tile}, {"plan_bytes", p.plan_ints * static_cast<int64_t>(sizeof(int32_t))}},
      .workspace_bytes = p.workspace_bytes,
      .launches = {{"plan", p.plan}, {"attention", p.attention}},
  };
}

LaunchPlan plan_select_pages(const Sizes& sizes, const Device& device) {
  const int64_t tokens = sizes.at("tokens"), q_heads = sizes.at("q_heads"), max_blocks = sizes.at("max_blocks");
  const auto p = cuda::plan_select_pages(tokens, static_cast<int>(q_heads), static_cast<int>(sizes.at("kv_heads")),
                                         static_cast<int>(sizes.at("head_dim")),
                                         static_cast<int>(sizes.at("block_size")), max_blocks, device);
  return {
      .facts = {{"lanes_per_page", p.lanes}, {"parts", p.parts}},
      .workspace_bytes = tokens * q_heads * max_blocks * static_cast<int64_t>(sizeof(float)),
      .launches = {{"select_pages", p.launch}},
  };
}

LaunchPlan plan_select_tokens(const Sizes& sizes, const Device& device) {
  const auto p = cuda::plan_select_tokens(sizes.at("tokens"), static_cast<int>(sizes.at("heads")),
                                          static_cast<int>(sizes.at("head_dim")), sizes.at("positions"),
                                          std::min(sizes.at("top_k"), sizes.at("positions")), device);
  LaunchPlan plan{
      .facts = {{"parts", p.parts}, {"tokens_at_once", p.group}},
      .workspace_bytes = p.group * p.stride * static_cast<int64_t>(sizeof(uint32_t)),
      .launches = {{"choose_tokens", p.choose}},
  };
  if (p.stride > 0) plan.launches.insert(plan.launches.begin(), {"score_tokens", p.score});
  return plan;
}

// The others need no scratch memory. 16-bit elements, in rows that allow 16-byte accesses.
constexpr int kVector = 8;
constexpr size_t kRowSharedBytes = 256;  // two numbers a warp, as rms_norm.cu has it

LaunchPlan plan_rms_norm(const Sizes& sizes, const Device&) {
  const auto p = cuda::plan_row(sizes.at("rows"), sizes.at("hidden"), kVector, kRowSharedBytes);
  return {
      .facts = {{"vectors_per_thread", p.thread_vectors}}, .workspace_bytes = 0, .launches = {{"rms_norm", p.launch}}};
}

LaunchPlan plan_add_lora(const Sizes& sizes, const Device&) {
  const auto p = cuda::plan_add_lora(sizes.at("tokens"), sizes.at("out"), sizes.at("max_rank"));
  return {
      .facts = {{"ranks_per_block", cuda::kLoraRanks}, {"tokens_per_block", cuda::kLoraTokens}},
      .workspace_bytes = sizes.at("tokens") * sizes.at("max_rank") * static_cast<int64_t>(sizeof(float)),
      .launches = {{"shrink", p.shrink}, {"expand", p.expand}},
  };
}

LaunchPlan plan_gated_delta_rule(const Sizes& sizes, const Device& device) {
  const int64_t tokens = sizes.at("tokens"), heads = sizes.at("value_heads"), value_dim = sizes.at("value_dim");
  const auto p = cuda::plan_gated_delta_rule(sizes.at("seqs"), tokens, heads, sizes.at("key_dim"), value_dim,
                                             sizes.at("channel_decay") != 0, device);
  return {
      .facts = {{"columns_per_block", p.rule.columns}, {"rows_per_warp", p.rule.rows}},
      .workspace_bytes = tokens * heads * value_dim * static_cast<int64_t>(sizeof(float)),
      .launches = {{"gated_delta_rule", p.rule.launch}, {"gated_norm", p.norm}},
  };
}

LaunchPlan plan_mamba2_scan(const Sizes& sizes, const Device& device) {
  const int64_t tokens = sizes.at("tokens"), heads = sizes.at("heads"), head_dim = sizes.at("head_dim");
  const auto p = cuda::plan_mamba2_scan(sizes.at("seqs"), tokens, heads, sizes.at("groups"), sizes.at("state_dim"),
                                        head_dim, device);
  return {
      .facts = {{"columns_per_block", p.scan.columns}, {"rows_per_warp", p.scan.rows}},
      .workspace_bytes = tokens * heads * head_dim * static_cast<int64_t>(sizeof(float)),
      .launches = {{"mamba2_scan", p.scan.launch}, {"scan_norm", p.norm}},
  };
}

LaunchPlan plan_store_kv_cache(const Sizes& sizes, const Device&) {
  const int heads = 2 * static_cast<int>(sizes.at("kv_heads")), head_dim = static_cast<int>(sizes.at("head_dim"));
  const auto p = cuda::plan_heads(sizes.at("tokens"), heads, head_dim, kVector, 0);
  return {.facts = {{"lanes_per_head", p.lanes}}, .workspace_bytes = 0, .launches = {{"store_kv_cache", p.launch}}};
}

LaunchPlan plan_norm_rotary_store(const Sizes& sizes, const Device&) {
  const int heads = static_cast<int>(sizes.at("q_heads") + 2 * sizes.at("kv_heads"));
  const int head_dim = static_cast<int>(sizes.at("head_dim"));
  const auto p =
      cuda::plan_heads(sizes.at("tokens"), heads, head_dim, kVector, cuda::head_stride(head_dim) * sizeof(float));
  return {.facts = {{"lanes_per_head", p.lanes}}, .workspace_bytes = 0, .launches = {{"norm_rotary_store", p.launch}}};
}

LaunchPlan plan_sample(const Sizes& sizes, const Device&) {
  const auto p = cuda::plan_sample(sizes.at("rows"), sizes.at("vocab"), sizes.at("modified") != 0);
  return {
      .facts = {{"parts", p.parts}, {"candidates", p.candidates}, {"pitch", p.pitch}},
      .workspace_bytes = p.scratch_bytes + p.parts_bytes,
      .launches = {{"sample", p.launch}},
  };
}

const std::vector<Policy>& policies() {
  static const std::vector<PlanSize> dense{{"m", 0}, {"n", 0}, {"k", 0}};
  static const std::vector<PlanSize> packed{{"m", 0}, {"n", 1}, {"k", 32}, {"group", 32, 128}};
  static const std::vector<Policy> all{
      {"gemm", dense, plan_gemm<WeightFormat::kDense>},
      {"int4_gemm", packed, plan_gemm<WeightFormat::kInt4>},
      {"int8_gemm", packed, plan_gemm<WeightFormat::kInt8>},
      {"lut_gemm", packed, plan_gemm<WeightFormat::kLut>},
      {"w8a8_gemm", {{"m", 0}, {"n", 1}, {"k", 32}}, plan_w8a8_gemm},
      {"paged_attention", {{"seqs", 0}, {"head_dim", 1}}, plan_paged_attention},
      {"select_pages",
       {{"tokens", 0}, {"q_heads", 1}, {"kv_heads", 1}, {"head_dim", 1}, {"block_size", 1}, {"max_blocks", 0}},
       plan_select_pages},
      {"select_tokens",
       {{"tokens", 0}, {"heads", 1}, {"head_dim", 1}, {"positions", 0}, {"top_k", 1}},
       plan_select_tokens},
      {"rms_norm", {{"rows", 0}, {"hidden", 1}}, plan_rms_norm},
      {"add_lora", {{"tokens", 0}, {"out", 1}, {"max_rank", 1}}, plan_add_lora},
      {"gated_delta_rule",
       {{"seqs", 0}, {"tokens", 0}, {"value_heads", 1}, {"key_dim", 1}, {"value_dim", 1}, {"channel_decay", 0, 0}},
       plan_gated_delta_rule},
      {"mamba2_scan",
       {{"seqs", 0}, {"tokens", 0}, {"heads", 1}, {"groups", 1}, {"state_dim", 1}, {"head_dim", 1}},
       plan_mamba2_scan},
      {"store_kv_cache", {{"tokens", 0}, {"kv_heads", 1}, {"head_dim", 1}}, plan_store_kv_cache},
      {"norm_rotary_store", {{"tokens", 0}, {"q_heads", 1}, {"kv_heads", 1}, {"head_dim", 1}}, plan_norm_rotary_store},
      {"sample", {{"rows", 0}, {"vocab", 1}, {"modified", 0, 0}}, plan_sample},
  };
  return all;
}

}  // namespace

std::vector<std::pair<std::string, std::vector<PlanSize>>> planned_operators() {
  std::vector<std::pair<std::string, std::vector<PlanSize>>> result;
  for (const Policy& policy : policies()) result.emplace_back(policy.op, policy.sizes);
  return result;
}

LaunchPlan launch_plan(const std::string& op, Sizes sizes, const Device& device) {
  for (const Policy& policy : policies()) {
    if (policy.op != op) continue;
    for (const PlanSize& size : policy.sizes) {
      if (size.usual >= 0) sizes.try_emplace(size.name, size.usual);
      const auto found = sizes.find(size.name);
      if (found == sizes.end()) throw std::invalid_argument(op + " needs the size " + size.name);
      if (found->second < size.least || found->second > kMost) {
        throw std::invalid_argument(size.name + " must be " + std::to_string(size.least) + " .. " +
                                    std::to_string(kMost) + ", got " + std::to_string(found->second));
      }
    }
    if (sizes.size() != policy.sizes.size()) {
      for (const auto& [name, value] : sizes) {
        bool known = false;
        for (const PlanSize& size : policy.sizes) known = known || size.name == name;
        if (!known) throw std::invalid_argument(op + " has no size " + name);
      }
    }
    return policy.plan(sizes, device);
  }
  std::string known;
  for (const Policy& policy : policies()) known += (known.empty() ? "" : ", ") + policy.op;
  throw std::invalid_argument("no launch policy for " + op + ", only for " + known);
}

}  // namespace fastinfer
