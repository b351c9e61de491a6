// Prints the launch policies' tiles as JSON, for rounds.py: {GPU: {kernel: {variant: {name: number}}}}. A program of
// its own, so that the figures are those of the sources whose machine code is read.
#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "attention/paged_attention_plan.h"
#include "gemm/gemm_plan.h"
#include "quant/w8a8_gemm_plan.h"

namespace cuda = fastinfer::cuda;
using cuda::WeightFormat;

constexpr int kSize = 8192, kGroup = 128, kExperts = 8;
constexpr std::pair<const char*, cuda::Device> kGpus[] = {
    {"A100", {80, 108, 163 * 1024}},
    {"RTX 4090", {89, 128, 99 * 1024}},
    {"H100", {90, 132, 227 * 1024}},
    {"H200", {90, 132, 227 * 1024}},
};
constexpr std::pair<const char*, WeightFormat> kFormats[] = {{"Dense", WeightFormat::kDense},
                                                             {"Int8", WeightFormat::kInt8},
                                                             {"Int4", WeightFormat::kInt4},
                                                             {"Lut", WeightFormat::kLut}};
constexpr int kTokens[] = {8, 16, 32, 64, 128, 512, 4096};

static const char* separator = "";

static void open(const char* name) {
  std::printf("%s\"%s\": {", separator, name);
  separator = "";
}

static void close() {
  std::printf("}");
  separator = ",\n";
}

static void print_tile(int variant, int rows, int chunk, const cuda::LaunchConfig& launch, bool warpgroups = false) {
  std::printf("%s\"%d\": {\"rows\": %d, \"chunk\": %d, \"threads\": %u, \"shared\": %zu, \"warpgroups\": %s}",
              separator, variant, rows, chunk, launch.block, launch.shared_bytes, warpgroups ? "true" : "false");
  separator = ",\n";
}

// The policy may choose another tile than for so many tokens; it is printed under its own number.
static void print_gemm(WeightFormat format, const cuda::Device& device, int experts) {
  for (const int tokens : kTokens) {
    const int64_t m = int64_t{tokens} * std::max(experts, 1);
    const auto p = cuda::gemm_plan(format, m, kSize, kSize, kGroup, device, experts);
    const bool warpgroups = device.arch == 90 && p.tile.tokens > cuda::kMostExactTokens;
    print_tile(p.tile.tokens, cuda::kGemmRows, p.tile.chunk, p.launch, warpgroups);
  }
}

int main() {
  std::printf("{");
  for (const auto& [gpu, device] : kGpus) {
    open(gpu);
    for (const auto& [name, format] : kFormats) {
      open(name);
      print_gemm(format, device, 0);
      close();
      open((std::string(name) + " grouped").c_str());
      print_gemm(format, device, kExperts);
      close();
    }
    open("w8a8");
    for (const int tokens : kTokens) {
      const auto p = cuda::plan_w8a8_gemm(tokens, kSize, kSize, device);
      print_tile(p.tile.tokens, cuda::kW8a8Rows, p.tile.chunk, p.launch, device.arch == 90 && p.tile.warpgroups());
    }
    close();
    open("attention");
    const auto print_attention = [&](int head_dim) {
      const bool warpgroups = device.arch == 90 && cuda::prefill_by_warpgroups(head_dim);
      print_tile(head_dim, cuda::row_tile(head_dim), cuda::kv_tile(head_dim), cuda::attention_launch(head_dim, 1),
                 warpgroups);
    };
    for (const int head_dim : cuda::kHeadDims) print_attention(head_dim);
    for (const int head_dim : {320, 576}) print_attention(head_dim);
    close();
    close();
  }
  std::printf("}\n");
}
