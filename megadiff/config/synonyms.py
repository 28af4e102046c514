"""Translate names that other trainers give to settings into config keys."""

from __future__ import annotations

# The last part of a refused key → what to write instead. None of them is the end of a key of ours.
SYNONYMS = {
    # steps and batches
    "learning_rate": "optim.lr",
    "batch_size": "train.prompts_per_step, each with algorithm.group_size samples",
    "train_batch_size": "train.prompts_per_step, each with algorithm.group_size samples",
    "global_batch_size": "train.prompts_per_step, each with algorithm.group_size samples",
    "micro_batch_size": "train.microbatch_size",
    "per_device_train_batch_size": "train.microbatch_size",
    "gradient_accumulation": "train.microbatch_size: the rest of a batch is accumulated",
    "gradient_accumulation_steps": "train.microbatch_size: the rest of a batch is accumulated",
    "epochs": "train.num_steps, each of train.prompts_per_step prompts",
    "num_epochs": "train.num_steps, each of train.prompts_per_step prompts",
    "num_train_epochs": "train.num_steps, each of train.prompts_per_step prompts",
    "max_steps": "train.num_steps",
    "max_train_steps": "train.num_steps",
    "ppo_epochs": "train.updates_per_step, which splits a batch: no sample comes twice",
    # the optimizer
    "max_norm": "optim.max_grad_norm",
    "grad_clip": "optim.max_grad_norm",
    "gradient_clipping": "optim.max_grad_norm",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.eps",
    "num_warmup_steps": "optim.warmup_steps",
    "lr_warmup_steps": "optim.warmup_steps",
    "lr_scheduler": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    # the algorithm
    "num_generations": "algorithm.group_size",
    "num_samples_per_prompt": "algorithm.group_size",
    "num_images_per_prompt": "algorithm.group_size",
    "clip_eps": "algorithm.clip_range",
    "kl_beta": "algorithm.kl_coef",
    "kl_weight": "algorithm.kl_coef",
    # samples
    "resolution": "rollout.height and rollout.width",
    "image_size": "rollout.height and rollout.width",
    "sampling_steps": "rollout.num_inference_steps",
    "cfg_scale": "rollout.guidance_scale, or rollout.true_cfg_scale for Qwen-Image",
    "noise_level": "rollout.eta",
    # the model, its memory and layout
    "model_name_or_path": "model.path",
    "pretrained_model_name_or_path": "model.path",
    "mixed_precision": "engine.dtype",
    "gradient_checkpointing": "engine.activation_memory_budget: 0 computes all of it again",
    "activation_checkpointing": "engine.activation_memory_budget: 0 computes all of it again",
    "tensor_parallel_size": "parallel.tp of the trainer, rollout.tp of its replicas",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "target_modules": "lora.targets",
    # the run
    "output_dir": "run.dir",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": "checkpoint.resume",
    "eval_steps": "eval.every",
    "report_to": "track",
}
