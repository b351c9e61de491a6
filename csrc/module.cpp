// The pybind11 module fastinfer._C: what has no tensors in it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/cpu/isa.h"
#include "common/cpu/launch_graph.h"
#include "common/cpu/parallel.h"
#include "formats/gguf.h"
#include "launch_plan.h"
#include "parallel/peer_group.h"
#include "parallel/peer_plan.h"
#include "parallel/process_group.h"
#include "roofline/roofline.h"

namespace fastinfer {
namespace {

namespace py = pybind11;

std::vector<std::string> names(const std::vector<cpu::Isa>& isas) {
  std::vector<std::string> result;
  for (const cpu::Isa isa : isas) result.emplace_back(cpu::name(isa));
  return result;
}

py::dict cpu_info() {
  const cpu::IsaChoice& choice = cpu::active_isa();
  py::dict info;
  info["features"] = cpu::cpu_features();
  info["isa"] = cpu::name(choice.isa);
  info["isa_reason"] = choice.reason;
  info["isas_built"] = names(cpu::built_isas());
  info["isas_usable"] = names(cpu::usable_isas());
  info["num_threads"] = cpu::num_threads();
  return info;
}

py::dict build_info() {
  py::dict info;
  info["version"] = FASTINFER_VERSION;
  info["compiler"] = FASTINFER_COMPILER;
  info["torch_target"] = FASTINFER_TORCH_TARGET;
#if defined(FASTINFER_CUDA)
  info["cuda_version"] = FASTINFER_CUDA_VERSION;
  info["cuda_archs"] = py::str(FASTINFER_CUDA_ARCHS).attr("split")(",");
#else
  info["cuda_version"] = py::none();
  info["cuda_archs"] = py::list();
#endif
  return info;
}

// Work done by all threads together, and the seconds that it took.
std::pair<double, double> roofline(const std::string& ceiling, const py::buffer& memory, int64_t passes) {
  static const std::map<std::string, cpu::Ceiling> ceilings{{"read", cpu::Ceiling::kRead},
                                                            {"byte_dot", cpu::Ceiling::kByteDot},
                                                            {"fp32_fma", cpu::Ceiling::kFp32Fma},
                                                            {"bf16_dot", cpu::Ceiling::kBf16Dot},
                                                            {"bf16_tiles", cpu::Ceiling::kBf16Tiles},
                                                            {"int8_tiles", cpu::Ceiling::kInt8Tiles}};
  const auto found = ceilings.find(ceiling);
  if (found == ceilings.end())
    throw std::invalid_argument("ceiling must be read, byte_dot, fp32_fma, bf16_dot, bf16_tiles or int8_tiles, got '" +
                                ceiling + "'");
  if (passes < 1) throw std::invalid_argument("passes must be at least 1, got " + std::to_string(passes));
  const py::buffer_info info = memory.request();
  if (!PyBuffer_IsContiguous(info.view(), 'C')) throw std::invalid_argument("memory must be contiguous, got strides");
  const int64_t bytes = info.size * info.itemsize / cpu::num_threads() / 512 * 512;
  double work = 0;
  const cpu::RooflineParams params{found->second, static_cast<const char*>(info.ptr), bytes, passes, &work};
  const auto start = std::chrono::steady_clock::now();
  cpu::roofline(params);
  return {work, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()};
}

py::dict plan_sizes() {
  py::dict result;
  for (const auto& [op, sizes] : planned_operators()) {
    py::dict usual;
    for (const PlanSize& size : sizes)
      usual[py::str(size.name)] = size.usual < 0 ? py::none() : py::object(py::int_(size.usual));
    result[py::str(op)] = usual;
  }
  return result;
}

py::dict plan(const std::string& op, const Sizes& sizes, int arch, int multiprocessors, size_t shared_bytes) {
  const LaunchPlan decided = launch_plan(op, sizes, {arch, multiprocessors, shared_bytes});
  py::dict result;
  for (const auto& [name, value] : decided.facts) result[py::str(name)] = value;
  result["workspace_bytes"] = decided.workspace_bytes;
  py::list launches;
  for (const auto& [kernel, config] : decided.launches) {
    py::dict launch;
    launch["kernel"] = kernel;
    launch["blocks"] = config.grid * config.grid_y;
    launch["threads"] = config.block;
    launch["shared_bytes"] = config.shared_bytes;
    launch["dependent"] = config.dependent;
    launches.append(launch);
  }
  result["launches"] = launches;
  return result;
}

void define_launch_graph(py::module_& m) {
  using cpu::GraphMemory, cpu::LaunchGraph;
  py::class_<GraphMemory, std::shared_ptr<GraphMemory>>(
      m, "GraphMemory", "Memory of the tensors that are made while graphs are recorded.")
      .def(py::init<>())
      .def(
          "owns",
          [](const GraphMemory& memory, uintptr_t data) { return memory.owns(reinterpret_cast<const void*>(data)); },
          py::arg("data"), "Whether the address lies in it.");
  py::class_<LaunchGraph>(m, "LaunchGraph", "Kernel calls, recorded and replayed; see fastinfer.ops.CPUGraph.")
      .def(py::init<std::shared_ptr<GraphMemory>>(), py::arg("memory"))
      .def("begin", &LaunchGraph::begin, "Note what this thread launches from now on.")
      .def("end", &LaunchGraph::end, "Note no more.")
      .def("clear", &LaunchGraph::clear, "Forget the launches.")
      .def("replay", &LaunchGraph::replay, py::call_guard<py::gil_scoped_release>(), "All launches in order.")
      .def("__len__", &LaunchGraph::size);
}

// A rank's view of a group in shared memory.
class ProcessGroup {
 public:
  ProcessGroup(py::buffer memory, int rank) : memory_(std::move(memory)), rank_(rank) {
    const py::buffer_info info = memory_.request(true);
    const auto bytes = static_cast<size_t>(info.size * info.itemsize);
    group_ = static_cast<parallel::Group*>(info.ptr);
    if (bytes < parallel::kSlotsOffset || bytes < parallel::group_bytes(group_->slot_bytes) || rank < 0 ||
        rank >= group_->size) {
      throw std::invalid_argument("memory must be that of a group with a rank " + std::to_string(rank) + ", got " +
                                  std::to_string(bytes) + " bytes of none");
    }
  }

  void send(const std::vector<int64_t>& words) {
    parallel::send(*group_, words);
  }
  std::vector<int64_t> receive() {
    return parallel::receive(*group_, rank_);
  }
  void finish() {
    parallel::finish(*group_, rank_);
  }
  void wait_for(int other) {
    parallel::wait_for(*group_, rank_, other);
  }
  void abort() {
    parallel::abort(*group_);
  }
  std::pair<uint64_t, uint64_t> exchanged() const {
    const parallel::RankState& state = group_->ranks[rank_];
    return {state.arrived.load(), state.bytes.load()};
  }

  static void initialize(const py::buffer& memory, int64_t size, int64_t slot_bytes, double deadline,
                         int64_t num_messages) {
    const py::buffer_info info = memory.request(true);
    const auto bytes = static_cast<size_t>(info.size * info.itemsize);
    if (slot_bytes < 1 || bytes < parallel::group_bytes(slot_bytes)) {
      throw std::invalid_argument("memory must have at least " + std::to_string(parallel::group_bytes(slot_bytes)) +
                                  " bytes, got " + std::to_string(bytes));
    }
    parallel::initialize(*static_cast<parallel::Group*>(info.ptr), size, slot_bytes, deadline, num_messages);
  }

  static void initialize_team(const py::buffer& memory, int64_t offset, int64_t first_rank, int64_t size) {
    const py::buffer_info info = memory.request(true);
    const auto bytes = info.size * info.itemsize;
    auto* const whole = static_cast<parallel::Group*>(info.ptr);
    const auto group_bytes = static_cast<int64_t>(parallel::group_bytes(whole->slot_bytes));
    if (offset < group_bytes || offset % alignof(parallel::Group) != 0 || bytes < offset + group_bytes) {
      throw std::invalid_argument("a team must lie behind the group in its memory, got the offset " +
                                  std::to_string(offset) + " in " + std::to_string(bytes) + " bytes");
    }
    parallel::initialize_team(*reinterpret_cast<parallel::Group*>(static_cast<std::byte*>(info.ptr) + offset), *whole,
                              first_rank, size);
  }

 private:
  const py::buffer memory_;
  const int rank_;
  parallel::Group* group_;
};

void define_process_group(py::module_& m) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  py::class_<ProcessGroup>(m, "ProcessGroup", "A rank of a group of processes; see fastinfer.parallel.group.")
      .def(py::init<py::buffer, int>(), py::arg("memory"), py::arg("rank"))
      .def_static("initialize", &ProcessGroup::initialize, py::arg("memory"), py::arg("size"), py::arg("slot_bytes"),
                  py::arg("deadline"), py::arg("num_messages"), "Make a group in memory of zeros.")
      .def_static("initialize_team", &ProcessGroup::initialize_team, py::arg("memory"), py::arg("offset"),
                  py::arg("first_rank"), py::arg("size"), "Make a team behind the group in its memory.")
      .def_static("num_bytes", &parallel::group_bytes, py::arg("slot_bytes"), "Size of its memory.")
      .def("send", &ProcessGroup::send, py::arg("words"), released, "Rank 0: send the other ranks a message.")
      .def("receive", &ProcessGroup::receive, released, "Other ranks: wait for a message.")
      .def("finish", &ProcessGroup::finish, "Say that the message was carried out.")
      .def("wait_for", &ProcessGroup::wait_for, py::arg("other"), released,
           "Wait until another rank has carried out the message that is this rank's next.")
      .def("abort", &ProcessGroup::abort, "End all waits of all ranks with an error.")
      .def("exchanged", &ProcessGroup::exchanged, "Numbers of exchanges and bytes that this rank has sent.");
}

py::bytes peer_table(const std::vector<uintptr_t>& addresses, int64_t memory_bytes, double deadline, uintptr_t aborted,
                     std::optional<int64_t> one_shot_bytes) {
  if (addresses.empty() || addresses.size() > parallel::kMaxPeers) {
    throw std::invalid_argument("a group of GPUs must have between 1 and " + std::to_string(parallel::kMaxPeers) +
                                " ranks, got " + std::to_string(addresses.size()));
  }
  const int64_t slots = memory_bytes - static_cast<int64_t>(sizeof(parallel::PeerState));
  parallel::PeerGroup group{
      .size = static_cast<int64_t>(addresses.size()),
      .slot_bytes = slots / 32 * 16,
      .one_shot_bytes = one_shot_bytes.value_or(cuda::one_shot_bytes(static_cast<int64_t>(addresses.size()))),
      .deadline_ns = static_cast<int64_t>(deadline * 1e9),
      .aborted = reinterpret_cast<uint64_t*>(aborted),
      .memory = {},
  };
  if (group.slot_bytes < 16) {
    throw std::invalid_argument("memory must have at least " + std::to_string(parallel::peer_memory_bytes(16)) +
                                " bytes, got " + std::to_string(memory_bytes));
  }
  for (size_t rank = 0; rank < addresses.size(); ++rank) {
    group.memory[rank] = reinterpret_cast<std::byte*>(addresses[rank]);
  }
  return {reinterpret_cast<const char*>(&group), sizeof group};
}

void define_peer_group(py::module_& m) {
  m.attr("MAX_PEERS") = parallel::kMaxPeers;
  m.def("peer_memory_bytes", &parallel::peer_memory_bytes, py::arg("slot_bytes"),
        "Size of a rank's memory in a group of GPUs.");
  m.def("peer_table", &peer_table, py::arg("addresses"), py::arg("memory_bytes"), py::arg("deadline"),
        py::arg("aborted"), py::arg("one_shot_bytes"),
        "The table of a group of GPUs, see fastinfer.parallel.peer_group.");
}

}  // namespace
}  // namespace fastinfer

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build facts, CPU features and threads; importing it registers torch.ops.fastinfer.*";
  fastinfer::cpu::active_isa();  // an impossible FASTINFER_CPU_ISA is an error at import, not at the first call
  m.def("build_info", &fastinfer::build_info, "What this library was built with.");
  m.def("cpu_info", &fastinfer::cpu_info, "CPU features, and the instruction set in use with the reason.");
  m.def("get_num_threads", &fastinfer::cpu::num_threads, "Threads that the CPU kernels use.");
  m.def("set_num_threads", &fastinfer::cpu::set_num_threads, pybind11::arg("count"),
        "Set the threads that the CPU kernels use; ValueError unless 1 <= count <= 1024.");
  m.def("roofline", &fastinfer::roofline, pybind11::arg("ceiling"), pybind11::arg("memory"), pybind11::arg("passes"),
        "Keep one resource of the CPU busy on all threads: 'read' passes over the memory, a contiguous buffer that the "
        "threads share out in multiples of 512 bytes; 'byte_dot', 'fp32_fma', 'bf16_dot', 'bf16_tiles' and "
        "'int8_tiles' passes of 1,024 steps in registers. Returns the bytes or operations done, 0 where the CPU "
        "cannot, and the seconds; ValueError for another ceiling or passes < 1.");
  m.def("launch_plan_sizes", &fastinfer::plan_sizes,
        "Operators with a launch policy, and the sizes that it asks for: name to usual value, None if there is none.");
  m.def("launch_plan", &fastinfer::plan, pybind11::arg("op"), pybind11::arg("sizes"), pybind11::arg("arch"),
        pybind11::arg("multiprocessors"), pybind11::arg("shared_bytes"),
        "How an operator would be launched on such a GPU; ValueError for an unknown operator or a size that does not "
        "fit.");
  fastinfer::define_launch_graph(m);
  fastinfer::define_process_group(m);
  fastinfer::define_peer_group(m);
  fastinfer::define_gguf(m);
}
