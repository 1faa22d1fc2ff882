//! A proof by one process: searches the whole tree.

use thiserror::Error;

use crate::heuristic::{TabuOptions, tabu_search};
use crate::instance::{Cost, Instance, Solution};
use crate::search::{BoundError, BoundKind, Directive, Search};

/// Where the first upper bound comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FirstBound {
    /// Only permutations below this value are of interest.
    Value(Cost),
    /// The best permutation of a tabu search.
    Heuristic(TabuOptions),
}

/// What a proof does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProofOptions {
    pub bound: BoundKind,
    pub first_bound: FirstBound,
}

/// The result of a complete search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    pub optimum: Optimum,
    /// Subproblems whose bound was computed.
    pub nodes: u64,
}

/// What a complete search proves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Optimum {
    /// No permutation costs less than this one.
    Solution(Solution),
    /// No permutation costs less than this value, which the caller gave.
    AtLeast(Cost),
}

impl Optimum {
    pub fn value(&self) -> Cost {
        match self {
            Self::Solution(solution) => solution.value,
            Self::AtLeast(value) => *value,
        }
    }
}

/// The caller stopped the search.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ProofError {
    #[error(transparent)]
    Bound(#[from] BoundError),
    #[error("stopped after {nodes} nodes with {open} subproblems left: nothing is proved")]
    Stopped { nodes: u64, open: usize },
}

/// Proves the optimum of an instance. `poll` is asked before every node.
pub fn solve(
    instance: &Instance,
    options: &ProofOptions,
    poll: impl FnMut(u64) -> Directive,
) -> Result<Proof, ProofError> {
    let mut search = Search::new(instance, options.bound)?;
    let (value, mut optimum) = match options.first_bound {
        FirstBound::Value(value) => (value, Optimum::AtLeast(value)),
        FirstBound::Heuristic(tabu) => {
            let solution = tabu_search(instance, tabu);
            (solution.value, Optimum::Solution(solution))
        }
    };
    let outcome = search.search(&search.root(), value, poll);
    if !outcome.rest.is_empty() {
        return Err(ProofError::Stopped {
            nodes: outcome.nodes,
            open: outcome.rest.len(),
        });
    }
    if let Some(solution) = outcome.best {
        optimum = Optimum::Solution(solution);
    }
    Ok(Proof {
        optimum,
        nodes: outcome.nodes,
    })
}
