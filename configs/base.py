"""Every field of a run, its default, and one comment each: the one place to look.

A config file starts from this and changes what differs; `--config.section.field=value` changes one
on the command line.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The defaults: the tiny model of the family."""
    c = ConfigDict()
    # random seed of initial weights, data order and dropout [>= 0 and < 2.14748e+09]
    c.seed = 0
    # checkpoint or Hugging Face folder whose weights (only) a new run starts from; empty = fresh
    # weights
    c.init_from = ""
    # parameters (* stands for anything) that may start fresh, or stay behind, where init_from and
    # the model differ
    c.init_allow = ()
    # folder of compiled programs; auto = the user's cache folder, off = none
    c.compile_cache = "auto"

    c.model = ConfigDict()
    # label shown in logs
    c.model.name = "tiny"
    # tokens the embedding holds; at least the tokenizer's [>= 2]
    c.model.vocab_size = 512
    # model width D [>= 1]
    c.model.dim = 64
    # decoder layers [>= 1]
    c.model.num_layers = 9
    # attention kinds kda, mla, dsa: a pattern repeated over the layers
    c.model.attention = "kda,kda,kda,dsa"
    # attention kind of the last layer; empty = as the pattern says [one of '', 'kda', 'mla', 'dsa']
    c.model.last_attention = "dsa"
    # layers in one block of Attention Residuals; 0 = plain residual stream [>= 0]
    c.model.attn_res_block = 3
    # RMSNorm epsilon [> 0]
    c.model.norm_eps = 1e-05
    # standard deviation of initial linear maps and embeddings [> 0]
    c.model.init_std = 0.02
    # use the input embedding as output head
    c.model.tie_embeddings = False
    # dropout of every sublayer's output [>= 0 and < 1]
    c.model.dropout = 0.0

    c.model.kda = ConfigDict()
    # heads N [>= 1]
    c.model.kda.num_heads = 4
    # query and key width H of a head [>= 1 and <= 256]
    c.model.kda.head_dim = 16
    # value width h of a head [>= 1]
    c.model.kda.value_head_dim = 16
    # taps of the short convolution [>= 1 and <= 16]
    c.model.kda.conv_size = 4
    # decay gate: bounded (K3) or softplus (Kimi-Linear) [one of 'bounded', 'softplus']
    c.model.kda.gate = "bounded"
    # smallest log decay of the bounded gate [>= -5 and < 0]
    c.model.kda.gate_lower_bound = -5.0
    # rank of the decay projection; 0 = one full matrix [>= 0]
    c.model.kda.decay_rank = 16
    # output gate projection: full or low_rank [one of 'full', 'low_rank']
    c.model.kda.output_gate = "full"
    # rank of the low-rank output gate [>= 1]
    c.model.kda.output_gate_rank = 16
    # positions handled at once; changes speed and rounding only [>= 1 and <= 256]
    c.model.kda.chunk = 64

    c.model.mla = ConfigDict()
    # heads N [>= 1]
    c.model.mla.num_heads = 4
    # query latent width Q; 0 = queries straight from the input [>= 0]
    c.model.mla.q_latent = 32
    # key-value latent width C [>= 1]
    c.model.mla.kv_latent = 16
    # content width of a query or key head [>= 1]
    c.model.mla.nope_dim = 16
    # extra key dims R shared by all heads [>= 0]
    c.model.mla.rope_dim = 8
    # value width h of a head [>= 1]
    c.model.mla.value_dim = 16
    # epsilon of the two latent norms [> 0]
    c.model.mla.latent_eps = 1e-06
    # sigmoid gate on the output: none, elementwise, or one a head [one of 'none',
    # 'elementwise', 'head']
    c.model.mla.output_gate = "elementwise"
    # rotation of the R dims: none (NoPE), interleaved or half-split pairs [one of 'none',
    # 'interleaved', 'half']
    c.model.mla.rope = "none"
    # base of the rotation frequencies [> 1]
    c.model.mla.rope_theta = 10000.0
    # YaRN context extension; 1 = off [>= 1]
    c.model.mla.yarn_factor = 1.0
    # context length YaRN extends from [>= 1]
    c.model.mla.yarn_original_length = 4096
    # YaRN: turns above which a frequency is kept [> 0]
    c.model.mla.yarn_beta_fast = 32.0
    # YaRN: turns below which it is divided by the factor [> 0]
    c.model.mla.yarn_beta_slow = 1.0
    # YaRN: magnitude of cos and sin [>= 0]
    c.model.mla.yarn_mscale = 1.0
    # YaRN: magnitude of the softmax scale [>= 0]
    c.model.mla.yarn_mscale_all_dim = 0.0

    c.model.dsa = ConfigDict()
    # indexer heads U [>= 1]
    c.model.dsa.num_heads = 4
    # indexer head width u [>= 1]
    c.model.dsa.head_dim = 16
    # keys J that a query attends to [>= 1]
    c.model.dsa.top_k = 8
    # rotation of the indexer's first R dims: none, interleaved, half [one of 'none',
    # 'interleaved', 'half']
    c.model.dsa.rope = "none"
    # epsilon of the index key's LayerNorm [> 0]
    c.model.dsa.k_norm_eps = 1e-05
    # warmup: dense attention, only the indexer learns; sparse: both learn; frozen: indexer
    # kept [one of 'warmup', 'sparse', 'frozen']
    c.model.dsa.stage = "sparse"
    # coefficient of the indexer's KL loss [>= 0]
    c.model.dsa.kl_weight = 1.0

    c.model.ffn = ConfigDict()
    # first layers that have a dense feed-forward instead of experts [>= 0]
    c.model.ffn.num_dense_layers = 1
    # inner width of the dense feed-forward [>= 1]
    c.model.ffn.dim = 128
    # situ or swiglu, in every feed-forward part [one of 'situ', 'swiglu']
    c.model.ffn.activation = "situ"
    # SiTU bound of the gate [> 0]
    c.model.ffn.situ_beta = 4.0
    # SiTU bound of the linear part [> 0]
    c.model.ffn.situ_linear_beta = 25.0

    c.model.moe = ConfigDict()
    # routed experts E [>= 1]
    c.model.moe.num_experts = 16
    # experts A that a token uses [>= 1]
    c.model.moe.top_k = 4
    # inner width F of an expert [>= 1]
    c.model.moe.expert_dim = 32
    # routed experts as numbers, or packed in 4 bits (MXFP4) and frozen, for adapters on top
    # [one of 'plain', 'mxfp4']
    c.model.moe.expert_format = "plain"
    # width L the experts work on; 0 = the model width (plain MoE) [>= 0]
    c.model.moe.latent_dim = 32
    # RMSNorm on the combined latent
    c.model.moe.latent_norm = True
    # shared experts, held as one of num_shared x expert_dim [>= 0]
    c.model.moe.num_shared = 2
    # router score: sigmoid or softmax [one of 'sigmoid', 'softmax']
    c.model.moe.score = "sigmoid"
    # runs of experts for group-limited routing [>= 1]
    c.model.moe.num_groups = 1
    # groups that stay open to a token [>= 1]
    c.model.moe.top_groups = 1
    # divide the chosen scores by their sum
    c.model.moe.renormalize = True
    # factor on the combine weights [> 0]
    c.model.moe.route_scale = 1.0
    # combine weights from biased scores
    c.model.moe.weights_use_bias = False
    # quantile (QB), bias_step, aux or none [one of 'quantile', 'bias_step', 'aux', 'none']
    c.model.moe.balance = "quantile"
    # step of the bias-step balancing [>= 0]
    c.model.moe.bias_rate = 0.001
    # coefficient of the sequence-wise auxiliary loss [>= 0]
    c.model.moe.aux_weight = 0.0
    # how tokens reach experts; auto: local on one device, padded on CPU, ragged on GPU and TPU
    # [one of 'auto', 'local', 'padded', 'ragged']
    c.model.moe.exchange = "auto"
    # parts a device's tokens travel in, so that the exchange of one hides behind the experts'
    # work on another [>= 1]
    c.model.moe.exchange_slices = 1
    # a token is sent once for each of its experts, of their devices, or of their hosts (and then on
    # inside) [one of 'expert', 'device', 'host']
    c.model.moe.exchange_level = "expert"
    # hosts that share the experts, in equal runs of devices; 0 = mesh.dcn.expert [>= 0]
    c.model.moe.exchange_hosts = 0
    # send buffer of the padded exchange relative to even routing; what does not fit takes another
    # round [> 0]
    c.model.moe.buffer_factor = 1.5
    # receive buffer of the ragged exchange, likewise [> 0]
    c.model.moe.receive_factor = 1.25
    # 0 = dropless; else an expert takes this times its even share of a row, the rest is
    # dropped and counted [>= 0]
    c.model.moe.capacity_factor = 0.0

    c.model.vision = ConfigDict()
    # layers of the vision tower; 0 = no tower [>= 0]
    c.model.vision.num_layers = 0
    # width of the tower [>= 1]
    c.model.vision.dim = 64
    # heads of the tower [>= 1]
    c.model.vision.num_heads = 4
    # width of such a head, a multiple of 4 [>= 4]
    c.model.vision.head_dim = 16
    # inner width of the tower's MLPs [>= 1]
    c.model.vision.mlp_dim = 128
    # pixels a side of a patch; 2 x 2 patches become one token [>= 1]
    c.model.vision.patch = 14
    # learned positions a side, resized to the grid of each image [>= 1]
    c.model.vision.grid = 64
    # how they are resized: bilinear (K3) or bicubic (K2.5) [one of 'bilinear', 'bicubic']
    c.model.vision.grid_resize = "bilinear"
    # most frames of one clip [>= 1]
    c.model.vision.max_frames = 4
    # norms of the tower: rms (K3) or layer (K2.5) [one of 'rms', 'layer']
    c.model.vision.norm = "rms"
    # their epsilon [> 0]
    c.model.vision.norm_eps = 1.1920928955078125e-07
    # biases of the tower's and the projector's maps (K2.5)
    c.model.vision.biases = False
    # norm of the projector: after its maps (K3) or before them (K2.5) [one of 'after', 'before']
    c.model.vision.projector_norm = "after"
    # epsilon of the projector's norm [> 0]
    c.model.vision.projector_eps = 1e-05
    # token whose places take the features of images, one to one [>= 0]
    c.model.vision.pad_token = 0
    # most patches of an image; larger ones are shrunk [>= 4]
    c.model.vision.max_patches = 65536
    # most patches along a side of an image [>= 2]
    c.model.vision.max_side = 512

    c.mesh = ConfigDict()
    # pipeline stages (1 in this version) [>= -1]
    c.mesh.stage = 1
    # replicas of everything [>= -1]
    c.mesh.data = 1
    # devices that share the weights; -1 = what is left [>= -1]
    c.mesh.fsdp = -1
    # devices that share the experts [>= -1]
    c.mesh.expert = 1
    # devices that share a sequence (1 in this version) [>= -1]
    c.mesh.context = 1
    # devices that share a matrix (1 in this version) [>= -1]
    c.mesh.tensor = 1

    c.mesh.dcn = ConfigDict()
    # part of this axis that crosses hosts or slices [>= 1]
    c.mesh.dcn.stage = 1
    # part of this axis that crosses hosts or slices [>= 1]
    c.mesh.dcn.data = 1
    # part of this axis that crosses hosts or slices [>= 1]
    c.mesh.dcn.fsdp = 1
    # part of this axis that crosses hosts or slices [>= 1]
    c.mesh.dcn.expert = 1
    # part of this axis that crosses hosts or slices [>= 1]
    c.mesh.dcn.context = 1
    # part of this axis that crosses hosts or slices [>= 1]
    c.mesh.dcn.tensor = 1

    c.data = ConfigDict()
    # stdlib (Python's own source files), files, chat (conversations to fine-tune on), synthetic,
    # parquet, hf_dataset (folders that datasets.save_to_disk wrote), array_record, cache (what
    # `moejax data prepare` wrote), or webdataset (.tar shards of images and captions) [one of
    # 'stdlib', 'files', 'chat', 'synthetic', 'parquet', 'hf_dataset', 'array_record', 'cache',
    # 'webdataset']
    c.data.source = "stdlib"
    # globs of what the source reads; files: .txt .md .py (a document each), .jsonl (one a line)
    c.data.paths = ()
    # field of a .jsonl line or JSON record, or column of a table, that holds the text
    c.data.text_field = "text"
    # what an ArrayRecord's records are: text, json, or auto (by the first record of each file)
    # [one of 'auto', 'text', 'json']
    c.data.record_format = "auto"
    # path prefixes or folder names left out of stdlib
    c.data.exclude = ("test/", "site-packages/")
    # share of the documents held out, chosen by a hash of their name [> 0 and < 100]
    c.data.validation_percent = 5.0
    # globs of the held-out data; empty = a share of data.paths
    c.data.validation_paths = ()
    # hf_dataset folder with splits: the one to train on
    c.data.train_split = "train"
    # hf_dataset folder with splits: the one held out; a share of the other where it is not there
    c.data.validation_split = "validation"
    # documents of the synthetic source [>= 1]
    c.data.synthetic_docs = 1000
    # chat: the tokens that are learned: every answer with the token that ends it, the last answer,
    # or all tokens [one of 'completion', 'last', 'all']
    c.data.train_on = "completion"
    # chat: what becomes of a conversation longer than a row: it is left out, or loses the beginning
    # of its prompt (and is left out when its answers alone do not fit) [one of 'drop', 'truncate']
    c.data.too_long = "drop"
    # chat: file of a Jinja template; empty = the tokenizer's own, or what its family has by code
    c.data.chat_template = ""
    # sources mixed by tokens, instead of the one above: ({"name": "web", "source": "parquet",
    # "paths": ("web/*.parquet",), "weight": 0.7}, ...) with any of the fields above; on the
    # command line as JSON, or as a .json file
    c.data.mixture = ()
    # passes over the data (of a mixture: over the source that is through first), after which the
    # run ends; 0 = for ever [>= 0]
    c.data.epochs = 0
    # seed of the order of documents and rows; -1 = seed [>= -1 and < 2.14748e+09]
    c.data.shuffle_seed = -1
    # byte, bpe (trained at first use), or a path: tokenizer.json, tiktoken.model, their folder
    c.data.tokenizer = "bpe"
    # tokens of the trained BPE [>= 258]
    c.data.bpe_vocab_size = 512
    # tokens in a packed row [>= 2]
    c.data.seq_len = 512
    # rows in an optimizer step, over all devices and microbatches [>= 1]
    c.data.batch_size = 16
    # patches of images that a row has room for, a multiple of 4; 0 = rows without images [>= 0]
    c.data.image_patches = 0
    # how an image stands in a text: as in the family's prompts, or its features alone; auto: as in
    # Kimi-K3's where the tokenizer has its media tokens, else alone [one of 'auto', 'kimi_k3',
    # 'kimi_k25', 'kimi_vl', 'bare']
    c.data.image_style = "auto"
    # processes that prepare batches ahead; 0 = threads only [>= 0 and <= 64]
    c.data.num_workers = 0
    # batches prepared ahead [>= 1]
    c.data.prefetch = 4

    c.optim = ConfigDict()
    # muon (matrices by Muon, the rest by AdamW) or adamw [one of 'muon', 'adamw']
    c.optim.name = "muon"
    # peak learning rate of matrices (Muon), or of everything (adamw) [> 0]
    c.optim.lr = 0.02
    # peak learning rate of embeddings, head, norms and other vectors [> 0]
    c.optim.adam_lr = 0.004
    # decoupled weight decay [>= 0]
    c.optim.weight_decay = 0.1
    # momentum of Muon [>= 0 and < 1]
    c.optim.muon_momentum = 0.95
    # Newton-Schulz iterations [>= 1 and <= 20]
    c.optim.muon_steps = 5
    # orthogonalise query, key and value maps head by head
    c.optim.muon_per_head = True
    # first-moment decay [>= 0 and < 1]
    c.optim.adam_b1 = 0.9
    # second-moment decay [>= 0 and < 1]
    c.optim.adam_b2 = 0.95
    # epsilon of AdamW [> 0]
    c.optim.adam_eps = 1e-08
    # parameters without weight decay: parts of their names
    c.optim.no_decay = ("norm", "a_log", "dt_bias", "conv", "attn_res", "bias")
    # overrides (regular expression of names, learning-rate factor, weight decay or -1)
    c.optim.groups = ()
    # cosine, wsd (warm-up, stable, decay) or constant [one of 'cosine', 'wsd', 'constant']
    c.optim.schedule = "cosine"
    # share of the steps that warm up [>= 0 and <= 1]
    c.optim.warmup_fraction = 0.02
    # learning rate at the end relative to the peak [>= 0 and <= 1]
    c.optim.min_ratio = 0.1
    # share of the steps that decay in wsd [>= 0 and <= 1]
    c.optim.decay_fraction = 0.2
    # step at which wsd begins to decay, whatever num_steps says; -1 = by decay_fraction [>= -1]
    c.optim.decay_start = -1
    # largest global gradient norm; 0 = no clipping [>= 0]
    c.optim.clip_norm = 1.0
    # decay of an average of the weights kept beside them; 0 = none [>= 0 and < 1]
    c.optim.ema_decay = 0.0
    # largest attention logit before QK-clip shrinks a head; 0 = off [>= 0]
    c.optim.qk_clip = 0.0

    c.train = ConfigDict()
    # optimizer steps [>= 1]
    c.train.num_steps = 400
    # microbatches in a step [>= 1]
    c.train.accumulation = 1
    # dtype that the gradients of microbatches are summed and kept in until the update; bfloat16 is
    # half the memory, and rounds each sum to 8 bits [one of 'float32', 'bfloat16']
    c.train.accum_dtype = "float32"
    # most rows that a device takes at once: sets train.accumulation by the devices that are there,
    # so that a run goes on with fewer or more of them at the same batch; 0 = off [>= 0]
    c.train.rows_per_device = 0
    # dtype of activations and of weights at use: float32 or bfloat16 [one of 'float32', 'bfloat16']
    c.train.compute_dtype = "float32"
    # what the backward pass finds kept: none = all, nothing is computed again; full = no result of
    # a layer; dots = those of matrix products; exchange = what experts were sent and sent back;
    # auto = chosen for the least step time within swap.budget_gib
    # [one of 'none', 'full', 'dots', 'exchange', 'auto']
    c.train.remat = "none"
    # tokens a chunk of the loss; 0 = chosen by memory [>= 0]
    c.train.rows_per_chunk = 0
    # vocabulary a chunk of the loss; 0 = chosen by memory [>= 0]
    c.train.vocab_per_chunk = 0
    # coefficient of the squared log-partition loss [>= 0]
    c.train.z_loss = 0.0
    # stop after this step, as if interrupted; -1 = run to num_steps [>= -1]
    c.train.stop_at = -1
    # names of the parameters that are trained, * for anything: ("*.router.*", "*norm*"); the others
    # get no gradient and no optimizer state; empty = all are trained
    c.train.trainable = ()
    # dtype that the untrained parameters are stored in [one of 'float32', 'bfloat16']
    c.train.frozen_dtype = "float32"
    # before the first step, the expert exchange on these devices against 'local'; auto = where
    # experts lie on several devices [one of 'auto', 'on', 'off']
    c.train.self_check = "auto"
    # gathers beside compute: off = as the compiler likes; within = on TPUs beside the same layer,
    # as GPUs do anyway; ahead = on GPUs the next layer's too, so that two layers' weights are held
    # [one of 'off', 'within', 'ahead']
    c.train.prefetch = "within"
    # what becomes of a step whose loss or gradient is not finite, or whose loss is a spike: its
    # batch is kept for `moejax replay`, and the run stops, goes on without its update, or goes back
    # to the newest checkpoint and on behind its batch [one of 'stop', 'skip', 'rewind']
    c.train.bad_step = "stop"
    # bad steps in the whole run after which skip and rewind stop too [>= 1]
    c.train.bad_step_limit = 10
    # a loss above this multiple of the median of the last good ones is a spike; 0 = none is [>= 0]
    c.train.spike_factor = 0.0
    # good losses that the median is of; before there are so many no loss is a spike [>= 2]
    c.train.spike_window = 50
    # seconds of silence of a process after which the others name it and end, and seconds without a
    # step after which the process they wait for is named; 0 = never (JAX ends all after 100) [>= 0]
    c.train.watchdog_s = 90.0
    # steps between checks that devices hold the same bits of what they hold alike, and get the same
    # gradients of one microbatch twice; 0 = never [>= 0]
    c.train.check_every = 0

    c.memory = ConfigDict()
    # where the optimizer's moments of maps and tables live; host: in pinned host memory, of which
    # one layer's are on the devices at a time during the update [one of 'device', 'host']
    c.memory.optimizer = "device"
    # where the float32 values of trained maps live: with host the devices hold them in
    # train.compute_dtype, at the same numbers [one of 'device', 'host']
    c.memory.master = "device"
    # where the frozen maps of the layers live: with host each comes to the devices for its layer,
    # while the layer before computes [one of 'device', 'host']
    c.memory.frozen = "device"
    # GiB that the loss may take on a device beside its arguments and results: the chunks are chosen
    # by it, and a head that is too large whole is gathered in pieces; 0 = no bound [>= 0]
    c.memory.loss_gib = 0.0

    c.swap = ConfigDict()
    # results that are kept beside those of train.remat, by name (`moejax config --memory` has them)
    c.swap.keep = ()
    # results that go to the host's memory until the backward pass, by name
    c.swap.offload = ()
    # train.remat=auto: memory of a device that a step may take, in GiB; 0 = all of it [>= 0]
    c.swap.budget_gib = 0.0
    # train.remat=auto: memory of a host for its devices' results, in GiB; 0 = half of it [>= 0]
    c.swap.host_gib = 0.0
    # train.remat=auto: GB/s from a device to its host while all its devices copy; 0 = the
    # hardware's [>= 0]
    c.swap.link_gb_s = 0.0

    c.kernels = ConfigDict()
    # implementation that operators take where they have it and it runs; auto = the platform's
    # fastest, pallas = its Pallas kernels; what is taken, and why not another, is printed [one of
    # 'auto', 'ref', 'chunked', 'pallas', 'pallas_gpu', 'pallas_tpu']
    c.kernels.impl = "auto"

    c.lora = ConfigDict()
    # rank r of low-rank adapters over the frozen model; 0 = none, all parameters are trained [>= 0]
    c.lora.rank = 0
    # the adapters' product is multiplied by alpha / r [> 0]
    c.lora.alpha = 16.0
    # rank-stabilised: by alpha / sqrt(r) instead
    c.lora.rslora = False
    # share of what adapters read that is dropped in training [>= 0 and < 1]
    c.lora.dropout = 0.0
    # first values of A (B starts at 0): default = uniform up to in^-0.5, gaussian = deviation 1/r
    # [one of 'default', 'gaussian']
    c.lora.init = "default"
    # maps that get one: ends of published names (q_proj, k_proj, gate, ...), as in PEFT
    c.lora.targets = ()
    # a regular expression for the whole name, besides targets; empty = none
    c.lora.target_regex = ""
    # routed experts that get one: experts.gate_up_proj, experts.down_proj
    c.lora.target_parameters = ()
    # routed experts of a layer share one A and have a B each
    c.lora.shared_a = False
    # other ranks for some names: 'o_proj=4'
    c.lora.rank_pattern = ()
    # other alphas for some names: 'down_proj=20'
    c.lora.alpha_pattern = ()
    # a target that matches maps of several kinds is an error, not a warning
    c.lora.strict = False
    # large maps of the frozen model outside routed experts as numbers, or in 8 bits with a scale
    # for each output [one of 'plain', 'int8', 'fp8']
    c.lora.base_format = "plain"

    c.eval = ConfigDict()
    # steps between evaluations; 0 = only at the end [>= 0]
    c.eval.every = 100
    # batches of an evaluation; 0 = the whole validation split [>= 0]
    c.eval.batches = 0
    # rows of an evaluation batch; 0 = as in training [>= 0]
    c.eval.batch_size = 0
    # more sets to evaluate on, by name: ({"name": "web", "source": "parquet", "paths":
    # ("held_out.parquet",)}, ...) with the fields of data's sources, and "split": all, train or
    # validation
    c.eval.sets = ()

    c.samples = ConfigDict()
    # texts that the model continues during training, into samples.jsonl and TensorBoard: ("def ",)
    c.samples.prompts = ()
    # steps between samples; 0 = only at the end [>= 0]
    c.samples.every = 100
    # most tokens of a continuation [>= 1]
    c.samples.max_new_tokens = 64
    # divides the logits when a token is drawn; 0 takes the most likely one [>= 0]
    c.samples.temperature = 0.0

    c.checkpoint = ConfigDict()
    # steps between checkpoints; 0 = only at the end [>= 0]
    c.checkpoint.every = 100
    # newest checkpoints kept [>= 1]
    c.checkpoint.keep = 3
    # also keep every checkpoint whose step is a multiple; 0 = none [>= 0]
    c.checkpoint.keep_every = 0
    # also keep the one with the lowest evaluation loss
    c.checkpoint.keep_best = True
    # write in the background
    c.checkpoint.asynchronous = True
    # folder of the steps, where it is not WORKDIR/checkpoints: gs://BUCKET/RUN, or another disk
    c.checkpoint.dir = ""
    # steps between local checkpoints, which a restart on the same hosts prefers where they are
    # newer than the durable ones; 0 = none [>= 0]
    c.checkpoint.local_every = 0
    # folder of local checkpoints, on each host's own disk or in its memory (/dev/shm/moejax)
    c.checkpoint.local_dir = ""

    c.placement = ConfigDict()
    # steps between placements of the experts by their loads, so that devices have equal work; 0 =
    # only what placement.file says [>= 0]
    c.placement.every = 0
    # experts that a device repeats beside its own, the busiest of other devices [>= 0 and <= 64]
    c.placement.copies = 0
    # placement to begin with, as `moejax place` writes it; empty = by number
    c.placement.file = ""

    c.log = ConfigDict()
    # steps between lines of metrics.jsonl [>= 1]
    c.log.every = 1
    # steps whose tokens of each expert are summed in a line of expert_loads.jsonl; 0 = none [>= 0]
    c.log.loads_every = 10
    # write TensorBoard events too
    c.log.tensorboard = True
    # show a progress bar
    c.log.progress = True

    c.profile = ConfigDict()
    # steps to trace for xprof, as 10-12 or 10-12,500-502; empty = none
    c.profile.steps = ""
    # steps that are traced from SIGUSR1 on, by the processes that get it [>= 1]
    c.profile.steps_at_signal = 3
    return c
