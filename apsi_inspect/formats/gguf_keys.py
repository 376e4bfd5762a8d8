"""The GGUF keys that runtimes know, with their types; and what a key written with underscores means.

A key with a dot is taken as it is written. One without is looked up among the known keys written with underscores
(``llama_context_length`` is ``llama.context_length``); one that begins like a known group but is none of its keys is
refused, since a runtime would never find it; any other stays a key of one word. `docs/convert.md` states the rule;
`tests/test_gguf_write.py` compares the table with every method of `gguf.GGUFWriter`.
"""

from __future__ import annotations

import difflib
import re
from functools import cache

from ..errors import ValueRefusedError, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# type -> keys; {a} stands for the architecture
_TABLE = {
    "UINT32": """
        general.alignment general.file_type general.quantization_version general.base_model.count
        general.dataset.count tokenizer.ggml.token_type_count tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id
        tokenizer.ggml.eot_token_id tokenizer.ggml.eom_token_id tokenizer.ggml.unknown_token_id
        tokenizer.ggml.seperator_token_id tokenizer.ggml.padding_token_id tokenizer.ggml.mask_token_id
        tokenizer.ggml.fim_pre_token_id tokenizer.ggml.fim_suf_token_id tokenizer.ggml.fim_mid_token_id
        tokenizer.ggml.fim_pad_token_id tokenizer.ggml.fim_rep_token_id tokenizer.ggml.fim_sep_token_id
        tokenizer.ggml.prefix_token_id tokenizer.ggml.suffix_token_id tokenizer.ggml.middle_token_id
        imatrix.chunk_count imatrix.chunk_size clip.audio.attention.head_count clip.audio.block_count
        clip.audio.chunk_size clip.audio.conv_kernel_size clip.audio.embedding_length clip.audio.feed_forward_length
        clip.audio.max_pos_emb clip.audio.num_mel_bins clip.audio.projection_dim clip.audio.projector.downsample_rate
        clip.audio.projector.head_count clip.audio.projector.stack_factor clip.audio.projector.window_size
        clip.vision.attention.head_count clip.vision.block_count clip.vision.embedding_length
        clip.vision.feed_forward_length clip.vision.image_max_pixels clip.vision.image_min_pixels
        clip.vision.image_size clip.vision.n_wa_pattern clip.vision.patch_size clip.vision.preproc_image_size
        clip.vision.preproc_max_tiles clip.vision.preproc_min_tiles clip.vision.projection_dim
        clip.vision.projector.scale_factor clip.vision.sam.block_count clip.vision.sam.embedding_length
        clip.vision.sam.head_count clip.vision.spatial_merge_size clip.vision.window_size {a}.vocab_size
        {a}.context_length {a}.embedding_length {a}.embedding_length_out {a}.features_length
        {a}.embedding_length_per_layer_input {a}.block_count {a}.leading_dense_block_count {a}.feed_forward_length
        {a}.expert_feed_forward_length {a}.expert_shared_feed_forward_length {a}.expert_chunk_feed_forward_length
        {a}.expert_count {a}.expert_used_count {a}.expert_shared_count {a}.expert_group_count
        {a}.expert_group_used_count {a}.expert_gating_func {a}.experts_per_group {a}.moe_every_n_layers
        {a}.moe_latent_size {a}.nextn_predict_layers {a}.n_deepstack_layers {a}.pooling_type
        {a}.decoder_start_token_id {a}.decoder_block_count {a}.rescale_every_n_layers {a}.time_mix_extra_dim
        {a}.time_decay_extra_dim {a}.token_shift_count {a}.interleave_moe_layer_step {a}.full_attention_interval
        {a}.altup.active_idx {a}.altup.num_inputs {a}.attention.head_count {a}.attention.head_count_kv
        {a}.attention.key_length {a}.attention.value_length {a}.attention.key_length_mla
        {a}.attention.value_length_mla {a}.attention.key_length_swa {a}.attention.value_length_swa
        {a}.attention.q_lora_rank {a}.attention.kv_lora_rank {a}.attention.decay_lora_rank
        {a}.attention.iclr_lora_rank {a}.attention.value_residual_mix_lora_rank {a}.attention.gate_lora_rank
        {a}.attention.relative_buckets_count {a}.attention.sliding_window {a}.attention.sliding_window_pattern
        {a}.attention.group_norm_groups {a}.attention.shared_kv_layers {a}.attention.temperature_length
        {a}.attention.indexer.head_count {a}.attention.indexer.key_length {a}.attention.indexer.top_k
        {a}.rope.dimension_count {a}.rope.dimension_count_swa {a}.rope.scaling.original_context_length
        {a}.ssm.conv_kernel {a}.ssm.inner_size {a}.ssm.state_size {a}.ssm.time_step_rank {a}.ssm.group_count
        {a}.wkv.head_size {a}.kda.head_dim {a}.shortconv.l_cache {a}.convnext.embedding_length
        {a}.convnext.block_count {a}.posnet.embedding_length {a}.posnet.block_count {a}.dense_2_feat_in
        {a}.dense_2_feat_out {a}.dense_3_feat_in {a}.dense_3_feat_out""",
    "INT32": """
        general.sampling.top_k general.sampling.penalty_last_n general.sampling.mirostat split.tensors.count""",
    "UINT16": "split.no split.count",
    "FLOAT32": """
        general.sampling.top_p general.sampling.min_p general.sampling.xtc_probability general.sampling.xtc_threshold
        general.sampling.temp general.sampling.penalty_repeat general.sampling.mirostat_tau
        general.sampling.mirostat_eta adapter.lora.alpha clip.audio.attention.layer_norm_epsilon
        clip.vision.attention.layer_norm_epsilon {a}.attention.layer_norm_epsilon {a}.attention.layer_norm_rms_epsilon
        {a}.attention.group_norm_epsilon {a}.attention.clamp_kqv {a}.attention.max_alibi_bias {a}.attention.scale
        {a}.attention.output_scale {a}.attention.temperature_scale {a}.attn_logit_softcapping
        {a}.final_logit_softcapping {a}.router_logit_softcapping {a}.logit_scale {a}.embedding_scale
        {a}.residual_scale {a}.expert_weights_scale {a}.expert_group_scale {a}.rope.freq_base {a}.rope.freq_base_swa
        {a}.rope.scaling.factor {a}.rope.scaling.alpha {a}.rope.scaling.attn_factor
        {a}.rope.scaling.yarn_log_multiplier {a}.rope.scaling.yarn_ext_factor {a}.rope.scaling.yarn_attn_factor
        {a}.rope.scaling.yarn_beta_fast {a}.rope.scaling.yarn_beta_slow""",
    "BOOL": """
        tokenizer.ggml.add_bos_token tokenizer.ggml.add_eos_token tokenizer.ggml.add_sep_token
        tokenizer.ggml.add_space_prefix tokenizer.ggml.remove_extra_whitespaces clip.has_vision_encoder
        clip.has_audio_encoder clip.has_llava_projector clip.use_gelu clip.use_silu diffusion.shift_logits
        {a}.use_parallel_residual {a}.attention.causal {a}.expert_weights_norm {a}.swin_norm
        {a}.rope.scaling.finetuned {a}.ssm.dt_b_c_rms""",
    "STRING": """
        general.architecture general.type general.name general.author general.version general.organization
        general.finetune general.basename general.description general.quantized_by general.size_label general.license
        general.license.name general.license.link general.url general.doi general.uuid general.repo_url
        general.source.url general.source.doi general.source.uuid general.source.repo_url general.sampling.sequence
        general.base_model.{i}.name general.base_model.{i}.author general.base_model.{i}.version
        general.base_model.{i}.organization general.base_model.{i}.description general.base_model.{i}.url
        general.base_model.{i}.doi general.base_model.{i}.uuid general.base_model.{i}.repo_url
        general.dataset.{i}.name general.dataset.{i}.author general.dataset.{i}.version
        general.dataset.{i}.organization general.dataset.{i}.description general.dataset.{i}.url
        general.dataset.{i}.doi general.dataset.{i}.uuid general.dataset.{i}.repo_url tokenizer.ggml.model
        tokenizer.ggml.pre tokenizer.huggingface.json tokenizer.rwkv.world tokenizer.chat_template
        tokenizer.chat_template.{n} adapter.type adapter.lora.task_name adapter.lora.prompt_prefix clip.projector_type
        clip.vision.projector_type clip.audio.projector_type {a}.tensor_data_layout {a}.rope.scaling.type""",
    "ARRAY[STRING]": """
        general.tags general.languages tokenizer.ggml.tokens tokenizer.ggml.merges tokenizer.chat_templates
        imatrix.datasets {a}.classifier.output_labels""",
    "ARRAY[INT32]": "tokenizer.ggml.token_type clip.vision.wa_layer_indexes {a}.rope.dimension_sections",
    "ARRAY[UINT32]": "adapter.alora.invocation_tokens",
    "ARRAY[UINT8]": "tokenizer.ggml.precompiled_charsmap",
    "ARRAY[BOOL]": "clip.vision.is_deepstack_layers",
    "ARRAY[FLOAT32]": """
        tokenizer.ggml.scores clip.vision.image_mean clip.vision.image_std xielu.alpha_p xielu.alpha_n xielu.beta
        xielu.eps {a}.activation_sparsity_scale {a}.swiglu_clamp_exp {a}.swiglu_clamp_shexp""",
}
KEYS: dict[str, str] = {key: kind for kind, keys in _TABLE.items() for key in keys.split()}
_GROUPS = ("general", "tokenizer", "split", "adapter", "imatrix", "clip")
_NUMBERED = re.compile(r"general\.(base_model|dataset)\.(0|[1-9][0-9]*)\.")
_FLAT_NUMBERED = re.compile(r"general_(base_model|dataset)_(0|[1-9][0-9]*)_(.+)")


def known_type(key: str) -> str | None:
    """The type that runtimes expect of a dotted key; None where it is none of the known ones.

    A key of several types (``{arch}.attention.head_count`` may be a number or a list, one a layer) has the scalar's.
    """
    if key in KEYS:
        return KEYS[key]
    group, _, rest = key.partition(".")
    if group == "tokenizer" and rest.startswith("chat_template.") and rest != "chat_template.":
        return KEYS["tokenizer.chat_template.{n}"]
    if group == "general":
        return KEYS.get(_NUMBERED.sub(r"general.\1.{i}.", key))
    return KEYS.get("{a}." + rest) if rest and group not in _GROUPS else None


@cache
def _spelled(architecture: str | None) -> dict[str, str]:
    """Known keys written with underscores -> as they are, for one architecture (None: those that need none)."""
    out = {}
    for key in KEYS:
        if "{i}" in key or "{n}" in key or key.startswith("{a}") != (architecture is not None):
            continue
        full = key.replace("{a}", architecture or "")
        out[_flat(full)] = full
    return out


def _flat(name: str) -> str:
    return re.sub(r"[^0-9A-Za-z]", "_", name)


def _common(key: str) -> str | None:
    """The dotted form of a key that belongs to no architecture."""
    found = _spelled(None).get(key)
    if found is not None:
        return found
    if key.startswith("tokenizer_chat_template_"):
        return f"tokenizer.chat_template.{key.removeprefix('tokenizer_chat_template_')}"
    numbered = _FLAT_NUMBERED.fullmatch(key)
    if numbered:
        full = f"general.{numbered[1]}.{numbered[2]}.{numbered[3]}"
        return full if known_type(full) else None
    return None


@cache
def _architectures() -> tuple[str, ...]:
    """The architectures that the installed `gguf` package knows."""
    from gguf.constants import MODEL_ARCH_NAMES

    return tuple(MODEL_ARCH_NAMES.values())


def _of_architecture(key: str) -> list[tuple[str, str]]:
    """(architecture, dotted key) for every known architecture that a key may mean."""
    return [(a, _spelled(a)[key]) for a in _architectures() if key.startswith(_flat(a) + "_") and key in _spelled(a)]


def infer_architecture(keys: Iterable[str]) -> str | None:
    """The one architecture whose known keys stand among `keys`, written either way; None where there is none.

    Raises
    ------
    ValueRefusedError
        There are several.
    """
    found: dict[str, str] = {}
    for key in keys:
        group, _, rest = key.partition(".")
        if rest:
            if group in _architectures() and group not in _GROUPS and "{a}." + rest in KEYS:
                found.setdefault(group, key)
        elif "_" in key and _common(key) is None:
            for architecture, _ in _of_architecture(key):
                found.setdefault(architecture, key)
    if len(found) > 1:
        shown = ", ".join(f"{quote(k)} of {a}" for a, k in sorted(found.items()))
        raise ValueRefusedError(f"the metadata has keys of several architectures ({shown}): give architecture=")
    return next(iter(found), None)


def resolve(key: str, architecture: str | None) -> str:
    """The key as it stands in the file.

    Raises
    ------
    ValueRefusedError
        It begins like a known group or architecture, but is none of its keys.
    """
    if "." in key:
        return key
    found = _common(key) or (_spelled(architecture).get(key) if architecture else None)
    if found is not None:
        return found
    others = _of_architecture(key) if "_" in key else []
    if others:
        have = f"the architecture is {quote(architecture)}" if architecture else "no architecture is given"
        raise ValueRefusedError(
            f"metadata key {quote(key)} means {quote(others[0][1])} of {others[0][0]}, but {have}: "
            f"write it with dots to keep it, or give architecture={others[0][0]!r}"
        )
    groups = (*_GROUPS, *((_flat(architecture),) if architecture else ()))
    group = next((g for g in groups if key.startswith(g + "_")), None)
    if group is None:
        return key
    candidates = [*_spelled(None), *(_spelled(architecture) if architecture else ())]
    near = difflib.get_close_matches(key, candidates, 1)
    hint = f"did you mean {quote(near[0])}? " if near else ""
    raise ValueRefusedError(
        f"metadata key {quote(key)} begins with {group!r}, but no key that runtimes know is written so: "
        f"{hint}Write it with dots to store it as it is (as in {quote(key.replace('_', '.', 1))})"
    )
