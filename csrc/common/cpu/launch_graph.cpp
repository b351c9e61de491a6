#include "common/cpu/launch_graph.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace fastinfer::cpu {
namespace {

// Pages that no tensor reaches cost nothing.
constexpr size_t kSegmentBytes = size_t{64} << 20;

thread_local LaunchGraph* recording_graph = nullptr;

}  // namespace

void GraphMemory::begin() {
  const std::lock_guard lock(mutex_);
  if (active_) throw std::runtime_error("a graph that shares this memory is being recorded");
  active_ = true;
  ++recording_;
  for (Segment& segment : segments_) segment.used.clear();
}

void GraphMemory::end() {
  const std::lock_guard lock(mutex_);
  active_ = false;
}

GraphMemory::Allocation GraphMemory::allocate(size_t bytes) {
  const size_t size = std::max<size_t>(1, (bytes + kAlignment - 1) / kAlignment) * kAlignment;
  const std::lock_guard lock(mutex_);
  for (Segment& segment : segments_) {  // the first gap that is large enough
    size_t begin = 0;
    for (const auto& [next, end] : segment.used) {
      if (next - begin >= size) break;
      begin = end;
    }
    if (segment.size - begin < size) continue;
    segment.used.emplace(begin, begin + size);
    return {segment.data.get() + begin, recording_};
  }
  const size_t segment_size = std::max(size, kSegmentBytes);
  auto* const data = static_cast<std::byte*>(::operator new(segment_size, std::align_val_t{kAlignment}));
  Segment segment{decltype(Segment::data)(data), segment_size, {}};
  segment.used.emplace(0, size);
  segments_.push_back(std::move(segment));
  return {data, recording_};
}

void GraphMemory::free(const Allocation& allocation) {
  const std::lock_guard lock(mutex_);
  if (!active_ || allocation.recording != recording_) return;
  const auto* const data = static_cast<std::byte*>(allocation.data);
  for (Segment& segment : segments_) {
    if (data >= segment.data.get() && data < segment.data.get() + segment.size) {
      segment.used.erase(data - segment.data.get());
    }
  }
}

bool GraphMemory::owns(const void* data) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(segments_.begin(), segments_.end(), [data](const Segment& segment) {
    return data >= segment.data.get() && data < segment.data.get() + segment.size;
  });
}

LaunchGraph::~LaunchGraph() {
  if (recording_graph == this) end();
}

void LaunchGraph::begin() {
  if (recording_graph != nullptr) throw std::runtime_error("a graph is being recorded in this thread already");
  if (!launches_.empty()) throw std::runtime_error("this graph has been recorded already");
  memory_->begin();
  recording_graph = this;
}

void LaunchGraph::end() {
  if (recording_graph != this) throw std::runtime_error("this thread does not record this graph");
  recording_graph = nullptr;
  memory_->end();
}

void LaunchGraph::clear() {
  launches_.clear();
  weights_ = std::make_shared<std::vector<Memory>>();  // threads may read the old one
}

void LaunchGraph::append(std::function<void()> launch, const Memory& weight) {
  launches_.push_back(std::move(launch));
  if (weight.data != nullptr) weights_->push_back(weight);
}

void LaunchGraph::replay() const {
  if (recording_graph != nullptr) throw std::runtime_error("a graph cannot be replayed while another is recorded");
  if (launches_.empty()) throw std::runtime_error("this graph has no launches: record something first");
  if (!weights_->empty()) read_ahead_from_start(weights_);
  for (const auto& launch : launches_) launch();
  if (!weights_->empty()) read_ahead_from_start(weights_);  // a step like this one comes next, as a rule
}

LaunchGraph* recording() {
  return recording_graph;
}

}  // namespace fastinfer::cpu
