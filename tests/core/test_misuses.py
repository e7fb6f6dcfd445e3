"""Misuses by call and sentence: each is refused before a weight changes, and the next window is exact."""

import contextlib
import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, lr_scheduler  # noqa: F401  # in a table

import distaccum
from distaccum import Accumulator, DistaccumError, Extension, count_samples, count_tokens
from distaccum.extensions import NoiseScale, WideSums  # noqa: F401  # in a table
from tests.support.problems import BATCHES, assert_next_is_exact, trunk
from tests.support.windows import accumulating, hooked, loss_of, refused, rows_of, run_window, says, weights

# 1. Of the Accumulator's arguments; in a sentence, ... stands for any words


class Wrapping(torch.optim.Optimizer):
    """An optimizer around another one, of the shape of Opacus's: Optimizer.__init__ is never called."""

    def __init__(self, inner):
        self.original_optimizer = inner

    param_groups = property(lambda self: self.original_optimizer.param_groups)

    def step(self, closure=None):
        return self.original_optimizer.step(closure)


def keeping_samples():
    """A model that keeps gradients by sample, as Opacus marks it."""
    model = trunk()
    for parameter in model.parameters():
        parameter.grad_sample = None
    return model


class Judge(Extension):
    key = "judge"

    def judge(self, window, gradient):
        return None


class Nameless(Extension):
    def numbers(self, window):
        return 1


ARGUMENTS = """
steps=100 / 50 | TypeError: steps=2.0, expected a whole number of at least 1; ...100 // 50 ...
steps=0 | ValueError: steps=0, expected a whole number of at least 1; ...1 makes each micro-batch an update...
steps="4" | TypeError: steps='4', expected a whole number of at least 1; give a number without quotes...
steps=torch.ones(2) | TypeError: steps=tensor..., expected a whole number of at least 1; give a number...
steps=2, batch_size=4 | ValueError: steps is a number of micro-batches, ...; give one or the other
micro_batch_size="automatic" | ...micro_batch_size='automatic', expected...
micro_batch_size=2.5 | ...micro_batch_size=2.5, expected...
batch_size=4 | ValueError: batch_size=4 with micro_batch_size=None, expected a number of samples ...
reduction="avg" | ValueError: reduction='avg', expected one of 'mean', 'sum', 'sum_to_mean'
reduction={"a": "mean"}, count={"b": count_samples} | ValueError: ... names ['b'], expected the same losses in both
count=5 | TypeError: count=5 for 'count', expected a callable: batch -> number, as count_tokens('labels')
count=count_tokens | TypeError: ..., as count_tokens('labels')
count=lambda x, y: 1 | TypeError: ..., expected a callable: batch -> number, ...
max_norm=0 | ValueError: max_norm=0, expected a number above 0, or None
max_norm="1.0" | ValueError: max_norm='1.0', expected a number above 0, or None
batchnorm="fix" | ValueError: batchnorm='fix', expected one of 'warn', 'ignore'
sync="gathered" | ValueError: sync='gathered', expected one of 'last', 'every' for a plain module
scheduler=lr_scheduler.ReduceLROnPlateau(sgd) | TypeError: ReduceLROnPlateau needs a metric, ...; step it yourself
optimizer=SGD | TypeError: optimizer=type without param_groups, expected an optimizer
optimizer=None, max_norm=1.0 | ValueError: max_norm and ... no optimizer was given; pass it, or clip and skip ...
optimizer=torch.optim.LBFGS(sgd.param_groups[0]["params"]) | TypeError: LBFGS needs a closure ...; step it yourself
model=nn.Tanh() | ValueError: the model has no parameters, so there is no gradient to accumulate
model=trunk() | ValueError: ... none of the model's parameters; ... give model=[model, nn.ParameterList([patch])]
scheduler=lr_scheduler.StepLR(SGD(trunk().parameters(), 0.1), 1) | ValueError: scheduler is a StepLR of another SGD ...
step=4 | TypeError: Accumulator() got step=4, which is no argument of it; say steps=4
gradient_accumulation_steps=4 | TypeError: ...; say steps=4
accumulation_steps=4 | TypeError: ...; say steps=4
clip=1.0 | TypeError: ...; say max_norm=1.0
max_grad_norm=1.0 | TypeError: ...; say max_norm=1.0
cost=len | TypeError: ...; say micro_batch_size=ByCost(4096, cost=..., trim=...)
no_sync=True | TypeError: ... which is no argument of it; write: for window in ...
dataloader=[torch.ones(9, 9)] * 999 | TypeError: Accumulator() got dataloader=[tensor..., ...], which ...
verbose=True | TypeError: ...; it takes model, optimizer, steps, batch_size, ...
optimizer=Wrapping(sgd) | TypeError: optimizer is a Wrapping, a torch optimizer without step hooks, ...
model=keeping_samples() | ValueError: the model keeps the gradient of each sample (grad_sample on ...
scaler=True | TypeError: scaler=True is a bool without is_enabled, expected a scaler
optimizer=[sgd, sgd] | ValueError: optimizer holds the same SGD twice, which would step twice per update
scheduler=[lr_scheduler.StepLR(sgd, 1)] * 2 | ValueError: scheduler holds the same StepLR twice, which would ...
extensions=[Judge] | TypeError: ... expected a list of distaccum.Extension...
extensions=[Judge(), Judge()] | ValueError: ... expected each once...
extensions=[Nameless(), Nameless()] | ValueError: ... expected each once...
extensions=[Judge()], optimizer=None | ValueError: ...Judge.judge skips where the library steps...
extensions=[WideSums(torch.int32)] | ValueError: WideSums(torch.int32), expected torch.float32 or torch.float64
extensions=[WideSums("float32")] | ValueError: WideSums('float32'), expected torch.float32 or torch.float64
extensions=[NoiseScale()], count={"a": len, "b": count_samples} | ... several denominators (a, b), expected one: ...
model=sgd, optimizer=nn.Linear(2, 2) | TypeError: model=SGD without forward, ...; the model comes first...
model=nn.DataParallel(trunk()) | ...DataParallel, which has no engine here; ...DeepSpeed and DistributedDataParallel ...
"""


@pytest.mark.parametrize(("arguments", "sentence"), rows_of(ARGUMENTS))
def test_wrong_argument_is_refused_at_once(arguments, sentence):
    model = trunk()
    sgd = SGD(model.parameters(), lr=0.1)

    def make():
        given = eval(f"dict({arguments})", {**globals(), "sgd": sgd})
        Accumulator(**{"model": model, "optimizer": sgd, **given})

    assert says(sentence, refused(make))


# 2. Of an accumulator, and of its windows: "loop" in the place of backward, "then" after it, "after" the loop


def leave_by_break(accumulator, model):
    window = accumulator.window(BATCHES)
    for micro_batch in window:
        window.backward(loss_of(model, micro_batch))
        break
    return window


def step_again_after_it_failed(accumulator, model, optimizer):
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    window = run_window(accumulator.window(BATCHES), model)
    with pytest.raises(ZeroDivisionError):
        window.step()
    handle.remove()
    window.step()


def backward_in(items, window, loss, most=9):
    for _ in itertools.islice(items, most):
        window.backward(loss())


def retried_backward(window, loss):
    with contextlib.suppress(ZeroDivisionError):
        window.backward(hooked(loss(), lambda _: 1 / 0))
    window.backward(loss())


def two_of_one_graph(window, outputs):
    for power in window.parts([1, 2]):
        window.backward(outputs.square().mean() * power)


COUNT, FOREIGN = itertools.count(), torch.ones(1, requires_grad=True, dtype=torch.float64)
NAN = {"x": BATCHES[0]["x"] * math.nan}
CALLS = """
loop | pass | DistaccumError: a micro-batch without window.backward(loss) (in micro-batch 0 of 3)...
call | [x for x, _, _ in accumulator.windows(BATCHES)] | ...so loop over each: for window in windows: for x, y in window
loop | two_of_one_graph(window, model(batch["x"]).tanh()) | ... through the same graph, ...; use window.heads(...
then | window.backward(loss()) | DistaccumError: a second backward() in micro-batch 0 of 3, ... window.parts(items)...
call | accumulator.window(BATCHES).backward(loss_of(model, BATCHES[0])) | DistaccumError: ... not begun; call it in ...
loop | (loss().backward(), window.backward(loss())) | ...gradients came into the window that its backward() ...
then | window.step() | DistaccumError: step() on a window that is in its loop (in micro-batch 0 of 3); ...
call | leave_by_break(accumulator, model).step() | DistaccumError: step() on a window that is discarded (its loop ...
call | accumulator.window(BATCHES).step() | DistaccumError: step() on a window that is not begun; step once, ...
then | sgd.step() | DistaccumError: optimizer.step() before the window's own: ... optimizer=None ...
after | sgd.step() | DistaccumError: optimizer.step() before the window's own: ... optimizer=None ...
after | (sgd.zero_grad(), window.step()) | ...gradients were cleared between the window's loop and its step(), so ...
call | step_again_after_it_failed(accumulator, model, sgd) | DistaccumError: step() on a window that is discarded ...
call | [accumulator.window(BATCHES) for _ in accumulator.window(BATCHES)] | ...requested while one is in its loop ...
call | [(a.discard(), sgd.step()) for a, b in [map(accumulator.window, [BATCHES] * 2)] for _ in b] | ...before the ...
after | list(window) | ...this window is complete but not stepped; a window is iterated once
loop | list(window.parts([1, 2])) | DistaccumError: a part without window.backward(loss) (in ...
then | list(window.parts([1])) | DistaccumError: parts() in ..., expected it in a micro-batch that had ...
loop | backward_in(window.parts([1, 2]), window, loss, 1) | ...parts() or heads() was left before its last item; ...
loop | list(window.heads(outputs(batch), [1])) | DistaccumError: a head without window.backward(loss) (in ...
then | next(window.heads(outputs(batch), [1])) | DistaccumError: heads() in ..., expected it in a micro-batch ...
loop | backward_in(window.heads(outputs(batch), [1, 2]), window, loss, 1) | ...heads() was left before its last ...
loop | backward_in(window.heads(outputs(batch), [1]), window, loss) | ...no loss of heads() depends on the trunk's ...
loop | next(window.heads(outputs(batch), [])) | ValueError: heads() got no items, expected one for each backward
loop | next(window.heads(batch["x"], [1])) | ... got outputs without a graph...go through window.parts(heads)
loop | [next(window.heads(outputs(batch), [1])) for _ in window.parts("ab")] | ...in micro-batch 0 of 3 inside parts...
loop | retried_backward(window, loss) | ... failed in micro-batch 0 of 3: gradients are half added up; leave the loop...
loop | window.backward(loss().item()) | TypeError: backward() got 0..., a float, ... (without .item() or float())
loop | window.backward((loss(), loss())) | TypeError: backward() got a tuple of 2, expected the loss as a tensor ...
call | accumulator.update(BATCHES[0], loss_of(model, BATCHES[0])) | TypeError: update() got a Tensor as loss_fn, ...
loop | window.backward(model(batch["x"])) | ValueError: backward() got a loss of shape [2, 6, 4], expected a scalar; ...
loop | window.backward(batch["x"].mean()) | ValueError: backward() got a loss without a graph, which ...
loop | window.backward(loss(), retain_graph=True) | ... got retain_graph=, expected losses alone...window.heads(...
loop | window.backward(loss(), create_graph=True) | ... got create_graph=, expected losses alone...window.heads(...
loop | window.backward(loss(), inputs=True) | ... got inputs=, expected losses alone...window.heads(outputs, items)
loop | window.backward(loss(), gradient=True) | ... got gradient=, expected losses alone...window.heads(outputs, items)
loop | window.backward(tokens=loss()) | ValueError: backward() got ['tokens'], expected losses by name, of ['samples']
call | named.split(BATCHES[0]) | ValueError: ...pass micro_batch_size= or steps=...
call | named.windows(BATCHES) | ValueError: ...pass steps=...
named | window.backward(tokens=loss()) | DistaccumError: micro-batch 0 got no loss for ['samples']...
named | window.backward(loss()) | ValueError: ...without a name...window.backward(tokens=..., samples=...)...
call | accumulator.windows() | TypeError: Accumulator.windows() missing 1 required positional argument: 'loader'
call | accumulator.windows(None) | TypeError: windows() got a NoneType, expected a loader: ...micro-batches
call | accumulator.windows({"labels": 1}) | TypeError: windows() got a dict, expected a loader: ...micro-batches
call | accumulator.windows("train") | TypeError: windows() got a str, expected a loader: ...micro-batches
call | accumulator.windows(torch.ones(4, 2)) | TypeError: windows() got a Tensor, ...; cut it, as tensor.split...
call | accumulator.windows(torch.utils.data.TensorDataset(torch.ones(4, 2))) | ... a dataset yields samples; ...
call | [window for window in accumulator] | TypeError: ...write: for window in accumulator.windows(loader): ...
call | exec("with accumulator.window(BATCHES): pass") | TypeError: ...no context; write: for window in accumulator...
call | accumulator.windows(BATCHES, steps=4) | TypeError: windows() got steps=4, ...; give steps=4 to the Accumulator
call | accumulator.window(BATCHES).step(max_norm=1.0) | TypeError: ...; give max_norm=1.0 to the Accumulator
call | accumulator.window(BATCHES).step(clip=1.0) | TypeError: ...; give max_norm=1.0 to the Accumulator
call | accumulator.windows(BATCHES, ahaed=False) | TypeError: ...; say ahead=False
call | accumulator.split(BATCHES[0], BATCHES[1]) | TypeError: split() got ...; give one batch, as split((x, y))
call | accumulator.window(*BATCHES) | TypeError: window() got more ...; give one list of micro-batches
call | accumulator.update(BATCHES[0], lambda x, y: x) | TypeError: update() got <lambda>(x, y) as loss_fn, expected ...
call | accumulator.update(BATCHES[0], lambda batch: None) | ...None, a NoneType, ... (return it ...
call | accumulator.update(BATCHES[0], lambda b: loss_of(model, b).backward()) | ...as by loss.backward(), ...
call | accumulator.update(BATCHES[0], lambda b: len(b, b)) | TypeError: len() takes exactly one argument (2 given)
call | run_window(Accumulator(model).window([NAN]), model) | ... not finite...
call | Accumulator(model, sgd).update(BATCHES[0], loss_fn) | ... update() cuts a batch and no size was given...
call | Accumulator(model, sgd, batch_size=8, micro_batch_size="auto").windows([]) | ...'auto' is for update()...
call | contrast(lambda b: {"a": 1}, torch.sum) | ValueError: encode() gave a dict for a micro-batch of 1 samples, ...
call | contrast(lambda b: (outputs(b), torch.ones(())), torch.dot) | ... (a temperature) in loss_fn
call | contrast(lambda b: outputs(b).detach(), torch.sum) | ...encode() gave no representation with a graph ...
call | contrast(lambda b: outputs(b).repeat(2, 1, 1), torch.sum) | ...gave a tensor of shape [2, 6, 4] for a ...
call | contrast(outputs, lambda z: 1.0) | TypeError: loss_fn gave 1.0, a float, expected the loss as a tensor ...
call | contrast(outputs, lambda z: z) | ValueError: loss_fn gave a loss of shape [2, 6, 4], expected a scalar; ...
call | contrast(outputs, lambda z: z.detach().sum()) | ValueError: loss_fn gave a loss without a graph, ...
call | contrast(lambda b: next(COUNT) * outputs(b), torch.sum) | ...gave other representations the second time ...
call | contrast(outputs, lambda z: (z * FOREIGN).sum()) | ...loss_fn depends on a tensor of shape [1] that requires ...
call | Accumulator(model, sgd).contrast(BATCHES[0], outputs, torch.sum) | ...() cuts a batch and no size was ...
call | check(lambda b: loss_fn(b) * 0) | DistaccumError: ... zero in every parameter, so nothing was compared; ...
call | Accumulator(trunk().requires_grad_(False), steps=2).check(BATCHES[0], loss_fn) | ...nothing can be compared...
call | accumulator.check(BATCHES[2], loss_fn) | ValueError: check() got 1 samples, expected at least two, ...
call | accumulator.check(NAN, loss_fn) | ...loss of the whole batch is nan, and it or its gradient is not finite...
call | check(lambda b: {"b": loss_fn(b)}) | ...loss_fn gave losses ['b'], expected one for each of ['samples']
call | Accumulator(model, count=lambda b: 0, steps=2).check(BATCHES[0], loss_fn) | ...count gave 0 count for ...
call | Accumulator(model).check(BATCHES[0], loss_fn) | ... check() cuts a batch and no size was given; ...
loop | check(loss_fn) | ...another window was requested while one is in its loop ...
call | Accumulator(model, sgd, 4) | TypeError: Accumulator() got more ...; give the options by name, as steps=4
call | distaccum.save("x.pt", model) | TypeError: save() got more ...; name each part, as save(path, model=model, ...
call | next(Accumulator(model, steps=lambda index: 1.5).windows(BATCHES)) | ... steps(0)=1.5, expected a whole ...
"""


def misuse(where, code, accumulator, model, sgd):
    named = Accumulator(model, sgd, count={"tokens": count_tokens("labels"), "samples": count_samples})
    given = {**globals(), "accumulator": accumulator, "named": named, "model": model, "sgd": sgd}
    given |= {"loss_fn": partial(loss_of, model), "outputs": lambda batch: model(batch["x"])}
    given |= {name: partial(getattr(accumulator, name), BATCHES[0]) for name in ("check", "contrast")}
    if where == "call":
        return exec(code, given)
    window = (named if where == "named" else accumulator).window(BATCHES)
    try:
        for batch in window:
            loss = lambda batch=batch: loss_of(model, batch)  # noqa: E731
            if where in ("then", "after"):
                window.backward(loss())
            if where != "after":
                exec(code, {**given, "window": window, "batch": batch, "loss": loss})
        return exec(code, {**given, "window": window})
    finally:
        window.discard()


@pytest.mark.parametrize(("where", "code", "sentence"), rows_of(CALLS))
def test_misuse_raises_a_clear_error_and_changes_nothing(where, code, sentence):
    model = trunk()
    sgd = SGD(model.parameters(), lr=0.1)
    accumulator = Accumulator(model, sgd, steps=3)
    before = weights(model)
    assert says(sentence, refused(misuse, where, code, accumulator, model, sgd))
    assert torch.equal(weights(model), before)
    assert_next_is_exact(accumulator, model)


# 3. Of gradients between two micro-batches


CHANGES = {
    "cleared": lambda layer, *_: layer.zero_grad(),
    "zeroed in place": lambda layer, *_: layer.zero_grad(set_to_none=False),
    "clipped": lambda layer, *_: torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3),
    "replaced": lambda layer, *_: setattr(layer.weight, "grad", layer.weight.grad.clamp(-1e-3, 1e-3)),
    "of another backward": lambda layer, *_: layer.bias.norm().backward(),
    "unscaled": lambda _, optimizer, scaler: scaler.unscale_(optimizer),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_any_gradient_in_any_micro_batch_is_refused(change):
    for at in range(len(BATCHES)):
        scaler = GradScaler("cpu", init_scale=1.0) if change == "unscaled" else None
        model = trunk()
        optimizer = SGD(model.parameters(), lr=0.1)
        accumulator, before = Accumulator(model, optimizer, scaler=scaler), weights(model)
        window = accumulator.window(BATCHES)
        with pytest.raises(DistaccumError, match="cleared or changed in mid-window"):
            for i, batch in enumerate(window):
                window.backward(loss_of(model, batch))
                if i == at:
                    CHANGES[change](model[-1], optimizer, scaler)
        assert torch.equal(weights(model), before)
        assert_next_is_exact(accumulator, model)


# 4. Of an optimizer that would step nothing


def train_the_rest(model):
    """Freezes what the optimizer has, as `get_peft_model` does, which adds parameters that it does not have."""
    model[0].requires_grad_(False)


def assign(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def renew_a_layer(model):
    model[1] = nn.Linear(4, 3).double()


def step_in_backward(model):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def freeze_all_but_the_input(model):
    model.requires_grad_(False)
    model.register_forward_pre_hook(lambda _, inputs: inputs[0].requires_grad_())


UNTRAINED = """
train_the_rest | ...no parameter of the SGD got a gradient ...the model trains others (1.weight, 1.bias)...
assign | ...no parameter of the SGD ...others (0.weight, 0.bias, 1.weight and 1 more); ...assign=True...
renew_a_layer | ...some parameters of the SGD got no gradient ...trains others (1.weight, 1.bias); ...a new layer...
step_in_backward | ...no parameter of the SGD got a gradient ...a hook clears them...
freeze_all_but_the_input | ...no parameter of the SGD got a gradient ...they are frozen...
"""
OPTIONS = ({}, {"max_norm": 1.0}, {"on_nonfinite": "ignore"}, {"scaler": GradScaler})


@pytest.mark.parametrize(("spoil", "sentence"), rows_of(UNTRAINED))
def test_optimizer_that_would_step_nothing_is_refused_whatever_the_options(spoil, sentence):
    for options in OPTIONS:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double()
        optimizer = SGD((model[0] if spoil == "train_the_rest" else model).parameters(), lr=0.1)
        scaler = {"scaler": GradScaler("cpu")} if "scaler" in options else {}
        accumulator = Accumulator(model, optimizer, steps=2, **{**options, **scaler})
        globals()[spoil](model)
        before = weights(model)
        windows = accumulator.windows([torch.ones(2, 3).double()] * 2)
        assert says(sentence, refused(lambda: run_window(next(windows), model).step()))  # noqa: B023
        assert torch.equal(weights(model), before) and accumulator.index == 0


# 5. Of a count, and of a name


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "8", None, [2], 1 + 2j, torch.ones(2), "8" * 99])
def test_count_that_is_no_finite_number_of_at_least_0_is_refused(value):
    cure = r"; add them up with \.sum\(\)$" if isinstance(value, torch.Tensor) else ""
    with pytest.raises(ValueError, match=rf"^count gave .{{1,60}} for 'count' in micro-batch 0.*of at least 0{cure}"):
        Accumulator(trunk(), count=lambda batch: value).window(BATCHES)


@pytest.mark.parametrize("name", distaccum._ELSEWHERE)
def test_name_of_a_module_inside_is_named_with_it(name):
    module = f"distaccum.{distaccum._ELSEWHERE[name]}"
    with pytest.raises(ImportError, match=rf"{name} is in {module}: from {module} import {name}"):
        exec(f"from distaccum import {name}")


@pytest.mark.parametrize(("micro_step", "is_seen"), [(0, False), (1, True)])
def test_change_of_one_gradient_of_many_is_seen_after_the_last_backward(micro_step, is_seen):
    model, accumulator = accumulating(nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(100)]))
    window = accumulator.window([torch.ones(1)] * 2)
    with pytest.raises(DistaccumError, match="changed in mid-window") if is_seen else contextlib.nullcontext():
        for number, x in enumerate(window):
            window.backward(sum((parameter * x).sum() for parameter in model))
            if number == micro_step:
                model[1].grad.zero_()


@pytest.mark.parametrize("name", ["backward", "step", "zero_grad", "accumulate", "no_sync"])
def test_method_of_another_library_is_answered_with_the_loop(name):
    accumulator = Accumulator(trunk(), steps=3)
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; write: for window in accumulator.windows"):
        getattr(accumulator, name)
    with pytest.raises(AttributeError, match=r"no attribute 'undo'$"):
        accumulator.undo()
