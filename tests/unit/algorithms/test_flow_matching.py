"""The loss and its gradient by hand, and the noising that makes its target."""

import torch

from megadiff.algorithms.flow_matching import flow_matching
from megadiff.engines.microbatch import cut_rows, loss_inputs, microbatches
from megadiff.types import FlowBatch, MatchInputs, Sampling


def test_value_and_gradient_by_hand():
    generator = torch.Generator().manual_seed(0)
    velocity, target = (torch.randn(3, 4, 8, generator=generator) for _ in range(2))
    velocity.requires_grad_()
    weight = torch.tensor([1.0, 0.0, 2.0])
    output = flow_matching(
        MatchInputs(
            velocity_BLC=velocity,
            target_BLC=target,
            sigma_B=torch.tensor([0.1, 0.5, 0.9]),
            advantage_B=torch.ones(3),
            weight_B=weight,
        )
    )
    by_hand = sum(
        float(w)
        * sum(float(v - t) ** 2 for v, t in zip(row_v.flatten(), row_t.flatten(), strict=True))
        / 32
        for w, row_v, row_t in zip(weight, velocity.detach(), target, strict=True)
    )
    torch.testing.assert_close(output.loss_sum.item(), by_hand, rtol=1e-5, atol=0)
    assert (
        output.sums == {"loss/flow_matching": output.loss_sum}
        and not output.sums["loss/flow_matching"].requires_grad
    )
    output.loss_sum.backward()
    torch.testing.assert_close(
        velocity.grad, weight[:, None, None] * 2 * (velocity.detach() - target) / 32
    )


def test_a_batch_is_noised_along_the_straight_path_in_pieces():
    """(1 − sigma)·clean + sigma·noise; the target is what carries from clean to noise, whatever
    sigma is.
    """
    generator = torch.Generator().manual_seed(1)
    clean, noise = (torch.randn(5, 4, 8, generator=generator) for _ in range(2))
    sigma = torch.tensor([0.1, 0.3, 0.5, 0.7, 1.0])
    batch = FlowBatch(
        latents_NLC=clean,
        noise_NLC=noise,
        sigma_N=sigma,
        advantages_N=torch.arange(5.0) + 5,
        weights_N=torch.arange(5.0),
        denominator=5.0,
        group_index_N=torch.tensor([1, 0, 0, 1, 1]),
        conditioning={"prompt_embeds": torch.tensor([[3.0], [4.0]])},
        sampling=Sampling(height=32, width=32, num_inference_steps=4),
    )
    pieces = list(microbatches(batch, torch.arange(5), 2, torch.device("cpu")))
    assert len(pieces) == len(cut_rows(batch, torch.arange(5), 2)) == 3 and [
        len(piece.sigma_B) for piece in pieces
    ] == [2, 2, 1]
    inputs = [loss_inputs(batch, piece, piece.latents_BLC) for piece in pieces]
    expected = (1 - sigma)[:, None, None] * clean + sigma[:, None, None] * noise
    torch.testing.assert_close(torch.cat([piece.latents_BLC for piece in pieces]), expected)
    assert torch.equal(torch.cat([each.target_BLC for each in inputs]), noise - clean)
    assert torch.equal(torch.cat([each.weight_B for each in inputs]), batch.weights_N)
    assert torch.equal(torch.cat([each.advantage_B for each in inputs]), batch.advantages_N)
    assert torch.equal(torch.cat([each.sigma_B for each in inputs]), sigma)
    texts = torch.cat([piece.conditioning["prompt_embeds"] for piece in pieces])
    assert texts.flatten().tolist() == [4, 3, 3, 4, 4]
