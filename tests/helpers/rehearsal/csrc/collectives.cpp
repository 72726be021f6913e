// Process groups of rehearsed devices: gloo's, over the host's bytes.
//
// A group of the backend `nccl` takes what NCCL takes and gloo does not: rows of different numbers, means, calls in
// batches. One of the backend `gloo` takes of a device's tensors what gloo takes: collectives, no sends.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <numeric>

#include "host.h"

namespace rehearsal {

namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

// Several calls of gloo as one, and what is done once they have ended.
class Joined final : public Work {
 public:
  Joined(std::vector<WorkPtr> works, Tensors results, std::function<void()> after = {})
      : works_(std::move(works)), results_(std::move(results)), after_(std::move(after)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& work) { return work->isSuccess(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const WorkPtr& work : works_) work->wait(timeout);
    works_.clear();
    if (after_) std::exchange(after_, {})();
    return true;
  }
  void synchronize() override { wait(std::chrono::milliseconds(0)); }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return results_; }

 private:
  std::vector<WorkPtr> works_;
  Tensors results_;
  std::function<void()> after_;
};

class DeviceGroup final : public c10d::Backend {
 public:
  DeviceGroup(c10::intrusive_ptr<c10d::Backend> gloo, std::string name)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }
  bool supportsCoalescing() const override { return is_nccl(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  void startCoalescing() override { batch_.emplace(); }
  WorkPtr endCoalescing() override {
    auto works = std::move(*batch_);
    batch_.reset();
    return c10::make_intrusive<Joined>(std::move(works), Tensors());
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto host = hosts(tensors);
    return joined(gloo_->broadcast(host, opts), tensors);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto host = hosts(tensors);
    auto mine = opts;
    if (sums(mine.reduceOp)) host[0].div_(getSize());
    return joined(gloo_->allreduce(host, mine), tensors);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    TORCH_CHECK(is_nccl(), "gloo has no coalesced all-reduce of CUDA tensors");
    std::vector<WorkPtr> works;
    for (at::Tensor& each : tensors) {
      Tensors one{each};
      works.push_back(allreduce(one, opts));
    }
    return joined(std::move(works), tensors);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto host = hosts(tensors);
    auto mine = opts;
    if (sums(mine.reduceOp)) host[0].div_(getSize());
    return joined(gloo_->reduce(host, mine), tensors);
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto input = hosts(inputs);
    std::vector<Tensors> output{hosts(outputs[0])};
    if (!uneven(output[0])) return joined(gloo_->allgather(output, input, opts), outputs[0]);
    std::vector<WorkPtr> works;
    output[0][getRank()].copy_(input[0]);
    for (int root = 0; root < getSize(); ++root) {
      Tensors one{output[0][root]};
      c10d::BroadcastOptions from;
      from.rootRank = root;
      from.timeout = opts.timeout;
      if (one[0].numel()) works.push_back(gloo_->broadcast(one, from));
    }
    return joined(std::move(works), outputs[0]);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    at::Tensor to = host(output), from = host(input).contiguous();
    TORCH_CHECK(
        to.numel() == from.numel() * getSize(), "output tensor size must be equal to world_size times input tensor size");
    return joined(gloo_->_allgather_base(to, from, opts), {output});
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < outputs.size(); ++i) works.push_back(_allgather_base(outputs[i], inputs[i], opts));
    return joined(std::move(works), outputs);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    auto input = hosts(inputs);
    std::vector<Tensors> output;
    if (!outputs.empty()) output.push_back(hosts(outputs[0]));
    return joined(gloo_->gather(output, input, opts), inputs);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    auto output = hosts(outputs);
    std::vector<Tensors> input;
    if (!inputs.empty()) input.push_back(hosts(inputs[0]));
    return joined(gloo_->scatter(output, input, opts), outputs);
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto output = hosts(outputs);
    auto input = hosts(inputs[0]);
    auto mine = opts;
    const bool mean = sums(mine.reduceOp);
    Tensors copies;
    for (at::Tensor& each : input) copies.push_back(mean ? each.div(getSize()) : each.clone());
    std::vector<WorkPtr> works;
    for (int root = 0; root < getSize(); ++root) {
      Tensors one{copies[root]};
      c10d::ReduceOptions to;
      to.reduceOp = mine.reduceOp;
      to.rootRank = root;
      to.timeout = opts.timeout;
      if (one[0].numel()) works.push_back(gloo_->reduce(one, to));
    }
    return c10::make_intrusive<Joined>(std::move(works), outputs, [output, copies, rank = getRank()] {
      output[0].copy_(copies[rank].view_as(output[0]));
    });
  }

  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    at::Tensor to = host(output), from = host(input);
    auto mine = opts;
    TORCH_CHECK(
        from.numel() == to.numel() * getSize(), "input tensor must be the same size as output size times world size");
    from = sums(mine.reduceOp) ? from.div(getSize()) : from.clone();
    return joined(gloo_->_reduce_scatter_base(to, from, mine), {output});
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < outputs.size(); ++i) works.push_back(_reduce_scatter_base(outputs[i], inputs[i], opts));
    return joined(std::move(works), outputs);
  }

  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
      const c10d::AllToAllOptions& opts) override {
    at::Tensor received = host(output), sent = host(input);
    return joined(gloo_->alltoall_base(received, sent, to, from, opts), {output});
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    TORCH_CHECK(is_nccl(), "gloo has no all-to-all of lists");
    auto output = hosts(outputs), input = hosts(inputs);
    std::vector<int64_t> to, from;
    Tensors flat;
    for (const at::Tensor& each : output) to.push_back(each.numel());
    for (const at::Tensor& each : input) from.push_back(each.numel()), flat.push_back(each.reshape(-1));
    at::Tensor sent = at::cat(flat), received = at::empty({std::accumulate(to.begin(), to.end(), int64_t{0})}, sent.options());
    auto work = gloo_->alltoall_base(received, sent, to, from, opts);
    return c10::make_intrusive<Joined>(std::vector<WorkPtr>{work}, outputs, [output, received, sent, to] {
      auto parts = received.split_with_sizes(to);
      for (size_t i = 0; i < parts.size(); ++i) output[i].copy_(parts[i].view_as(output[i]));
    });
  }

  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    TORCH_CHECK(is_nccl(), "gloo sends no CUDA tensors");
    auto host = hosts(tensors);
    return joined(gloo_->send(host, rank, tag), tensors);
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    TORCH_CHECK(is_nccl(), "gloo receives no CUDA tensors");
    auto host = hosts(tensors);
    return joined(gloo_->recv(host, rank, tag), tensors);
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override { return gloo_->barrier(opts); }

 private:
  bool is_nccl() const { return name_ == "nccl"; }

  at::Tensor host(const at::Tensor& tensor) const {
    TORCH_CHECK(tensor.is_cuda(), "Tensors must be CUDA and dense, got one of ", tensor.device());
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    return on_host(tensor);
  }
  Tensors hosts(const Tensors& tensors) const {
    Tensors made;
    for (const at::Tensor& each : tensors) made.push_back(host(each));
    return made;
  }

  // Whether an operation is a mean, which is a sum for gloo.
  static bool sums(c10d::ReduceOp& op) {
    TORCH_CHECK(op != c10d::ReduceOp::PREMUL_SUM, "the rehearsal has no PREMUL_SUM");
    if (op != c10d::ReduceOp::AVG) return false;
    op = c10d::ReduceOp::SUM;
    return true;
  }

  static bool uneven(const Tensors& tensors) {
    return std::any_of(
        tensors.begin(), tensors.end(), [&](const at::Tensor& each) { return each.sizes() != tensors[0].sizes(); });
  }

  WorkPtr joined(WorkPtr work, const Tensors& results) { return joined(std::vector<WorkPtr>{std::move(work)}, results); }
  WorkPtr joined(std::vector<WorkPtr> works, const Tensors& results) {
    WorkPtr made = c10::make_intrusive<Joined>(std::move(works), results);
    if (batch_) batch_->push_back(made);
    return made;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::string name_;
  std::optional<std::vector<WorkPtr>> batch_;
};

}  // namespace

void bind_groups(py::module_& m) {
  py::class_<DeviceGroup, c10::intrusive_ptr<DeviceGroup>, c10d::Backend>(m, "DeviceGroup", py::dynamic_attr())
      .def(py::init([](const py::object& gloo, std::string name) {
        return c10::make_intrusive<DeviceGroup>(gloo.cast<c10::intrusive_ptr<c10d::Backend>>(), std::move(name));
      }))
      .def(py::init([](const py::object& store, int rank, int size, const py::object& options, const py::object&) {
        // ProcessGroupNCCL's arguments, and the device of PyTorch 2.15's
        const auto gloo = py::module_::import("torch.distributed").attr("ProcessGroupGloo")(
            store, rank, size, options.attr("_timeout"));
        return c10::make_intrusive<DeviceGroup>(gloo.cast<c10::intrusive_ptr<c10d::Backend>>(), "nccl");
      }), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"), py::arg("device") = py::none())
      .def_property_readonly("uid", [](const DeviceGroup& self) { return self.getID(); })
      .def("_group_start", [](const DeviceGroup&) {})
      .def("_group_end", [](const DeviceGroup&) {})
      .def("_is_initialized", [](const DeviceGroup&) { return true; })
      .def("_set_default_timeout", [](DeviceGroup& self, std::chrono::milliseconds timeout) { self.setTimeout(timeout); });
}

}  // namespace rehearsal
