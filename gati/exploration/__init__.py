"""Train and measure every variant at every block, and write the cache library.

The modules, in the order in which an exploration needs them:

- the verbs: `explore`, `further` (`--more`), `inspect` (`gati blocks`);
- what the folder holds, and whether it is the same exploration: `settings`, `claims`, `state`;
- the network and its inputs: `opening`, `network`, `splits`, `alike`; for later verbs `fresh`, `labels`;
- what may pay, before any training: `places`, `candidates`, `prepare`, `prepared`, `kept_answers`;
- networks that need no training: `companions`, `itself`;
- how long each group of caches trains: `budget`, `feasible`, `schedule`, `pace`, `planning`;
- what trains, in which order, and where: `stages`, `groups`, `executors`; on a Ray cluster `distributed`,
  `connecting`, `workers`;
- the training of one group: `train`; its batches: `views`, `augment`; its targets: `lessons`, `answers`,
  `remembered`; its steps: `recipes`, `muon`, `average`, `fronts`, `graphs`, `precision`, `failures`;
- what trained caches are worth and cost: `measure`, `learned`, `lookups`, `completion`;
- what all of them use: `devices`, `modes`, `memory`, `crowding`, `progress`;
- the result on disk, which every later verb reads: `library`, `weights`.
"""
