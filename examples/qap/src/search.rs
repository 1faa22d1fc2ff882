//! Depth-first branch and bound that can stop at any node and returns the rest of its tree.
//!
//! A subproblem is searched the same way wherever and whenever: what a node branches into
//! depends on the node and on the best value so far, on nothing else. If the best value is the
//! optimum from the start, the sum of nodes is the same for every order of subproblems and every
//! cut of the tree into tasks.

use serde::{Deserialize, Serialize};

use crate::bounds::gilmore_lawler::GilmoreLawler;
use crate::bounds::hahn_grant::{HahnGrant, MAX_HAHN_GRANT_SIZE};
pub use crate::bounds::{BoundError, Placement};
use crate::bounds::{Child, LowerBound, MAX_TARGET, round_up};
use crate::instance::{Cost, Instance, MAX_SIZE, Solution};
use crate::symmetry::Symmetry;

/// Subproblems with at most this many free locations are solved by trying all completions.
const TRIED_SIZE: usize = 3;

/// Which lower bound prunes the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BoundKind {
    GilmoreLawler,
    HahnGrant,
}

impl BoundKind {
    /// Returns the bound whose proofs are expected to take less time.
    pub fn for_instance(instance: &Instance) -> Self {
        if (HAHN_GRANT_FROM..=MAX_HAHN_GRANT_SIZE).contains(&instance.size()) {
            Self::HahnGrant
        } else {
            Self::GilmoreLawler
        }
    }
}

/// Size from which Hahn-Grant takes less time than Gilmore-Lawler for the instances of Nugent.
const HAHN_GRANT_FROM: usize = 17;

/// A subproblem: placements in the order of the branching, and a lower bound of its values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    pub path: Vec<Placement>,
    /// No completion costs less. Nodes with small bounds are the ones to search first.
    pub bound: Cost,
}

/// What the caller of a search wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Directive {
    Continue,
    /// Elsewhere a permutation of this value was found. Only smaller values matter from now on.
    Improved(Cost),
    /// Return the rest of the tree.
    Stop,
}

/// How far a search got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Subproblems whose bound was computed, without ancestors that were computed again.
    pub nodes: u64,
    /// The best permutation that was found, if one is better than the best value known.
    pub best: Option<Solution>,
    /// Subproblems that were not searched; empty if the search was complete.
    pub rest: Vec<Node>,
}

/// Searches subproblems of one instance.
pub struct Search {
    instance: Instance,
    /// Every value is a multiple of this.
    step: Cost,
    /// Value of the identity: values above are of no interest, and bounds rely on it.
    ceiling: Cost,
    engine: Box<dyn LowerBound + Send>,
    /// The path whose levels the engine holds; `None` before the root is computed.
    computed: Option<Vec<Placement>>,
    /// The smallest target of the levels that the engine holds. They know nothing of solutions
    /// above, so they are of no use for a larger target.
    held_target: Cost,
    frames: Vec<Frame>,
}

/// Children of a node on the current path.
#[derive(Default)]
struct Frame {
    children: Vec<Child>,
    next: usize,
}

impl Search {
    /// Prepares the search of any subproblem of `instance`.
    pub fn new(instance: &Instance, kind: BoundKind) -> Result<Self, BoundError> {
        let identity: Vec<u8> = (0..instance.size() as u8).collect();
        let ceiling = instance.evaluate(&identity);
        if ceiling > Cost::from(MAX_TARGET) {
            return Err(BoundError::TooCostly {
                worst: ceiling,
                limit: Cost::from(MAX_TARGET),
            });
        }
        let symmetry = Symmetry::of(instance);
        let engine: Box<dyn LowerBound + Send> = match kind {
            BoundKind::GilmoreLawler => Box::new(GilmoreLawler::new(instance, symmetry)?),
            BoundKind::HahnGrant => Box::new(HahnGrant::new(instance, symmetry, ceiling)?),
        };
        Ok(Self {
            instance: instance.clone(),
            step: instance.value_step(),
            ceiling,
            engine,
            computed: None,
            held_target: Cost::MAX,
            frames: Vec::new(),
        })
    }

    /// Returns the whole problem as a subproblem.
    pub fn root(&self) -> Node {
        Node {
            path: Vec::new(),
            bound: 0,
        }
    }

    /// Searches `node` for permutations that cost less than `best`, depth first.
    ///
    /// `poll` hears before every node how many nodes this search has computed, and says whether
    /// to continue. The search may return more subproblems than it was given, never one twice.
    pub fn search(
        &mut self,
        node: &Node,
        best: Cost,
        mut poll: impl FnMut(u64) -> Directive,
    ) -> Outcome {
        let mut run = Run {
            best: best.min(self.ceiling + 1),
            step: self.step,
            outcome: Outcome {
                nodes: 0,
                best: None,
                rest: Vec::new(),
            },
        };
        if run.target() > self.held_target {
            self.computed = None;
            self.held_target = Cost::MAX;
        }
        let base = node.path.len();
        self.frames
            .resize_with(self.instance.size() + 1, Frame::default);
        let mut path = node.path.clone();
        let mut bound = node.bound;
        loop {
            if bound <= run.target() {
                match poll(run.outcome.nodes) {
                    Directive::Continue => {}
                    Directive::Improved(value) => {
                        run.best = run.best.min(value);
                        continue;
                    }
                    Directive::Stop => {
                        run.outcome.rest.push(Node {
                            path: path.clone(),
                            bound,
                        });
                        self.return_rest(base, &mut path, &mut run);
                        return run.outcome;
                    }
                }
                self.compute(&path, &mut run);
            } else {
                let frame = &mut self.frames[path.len()];
                frame.children.clear();
                frame.next = 0;
            }
            let Some(child) = self.next_child(base, &mut path) else {
                return run.outcome;
            };
            path.push(child.placement);
            bound = child.bound;
        }
    }

    /// Computes the node at the end of `path` and puts its children in its frame.
    fn compute(&mut self, path: &[Placement], run: &mut Run) {
        let depth = path.len();
        let frame = &mut self.frames[depth];
        frame.children.clear();
        frame.next = 0;
        run.outcome.nodes += 1;
        if self.instance.size() - depth <= TRIED_SIZE {
            run.try_completions(&self.instance, path);
            return;
        }
        let target = run.target();
        self.held_target = self.held_target.min(target);
        self.restore(path, target);
        let children = &mut self.frames[depth].children;
        match path.last() {
            None => self.engine.expand_root(target, children),
            Some(&placement) => self.engine.expand(depth - 1, placement, target, children),
        }
        let computed = self.computed.get_or_insert_default();
        computed.clear();
        computed.extend_from_slice(path);
    }

    /// Has the engine compute all ancestors of the node at the end of `path` that it does not
    /// hold.
    fn restore(&mut self, path: &[Placement], target: Cost) {
        let Some((_, ancestors)) = path.split_last() else {
            return;
        };
        let mut unused = Vec::new();
        let held = match &self.computed {
            None => {
                self.engine.expand_root(target, &mut unused);
                0
            }
            Some(computed) => {
                let both = computed.iter().zip(ancestors);
                both.take_while(|(held, wanted)| held == wanted).count()
            }
        };
        for (depth, &placement) in ancestors.iter().enumerate().skip(held) {
            self.engine.expand(depth, placement, target, &mut unused);
        }
    }

    /// Takes the next child of the deepest frame that has one, and shortens the path to its
    /// parent.
    fn next_child(&mut self, base: usize, path: &mut Vec<Placement>) -> Option<Child> {
        loop {
            let frame = &mut self.frames[path.len()];
            if let Some(&child) = frame.children.get(frame.next) {
                frame.next += 1;
                return Some(child);
            }
            if path.len() == base {
                return None;
            }
            path.pop();
        }
    }

    /// Adds all open children to the rest. The last node of the path is there already.
    fn return_rest(&mut self, base: usize, path: &mut Vec<Placement>, run: &mut Run) {
        let target = run.target();
        while path.len() > base {
            path.pop();
            let frame = &self.frames[path.len()];
            for child in &frame.children[frame.next..] {
                if child.bound <= target {
                    let mut path = path.clone();
                    path.push(child.placement);
                    run.outcome.rest.push(Node {
                        path,
                        bound: child.bound,
                    });
                }
            }
        }
    }
}

/// State of one call of `search`.
struct Run {
    /// Smallest value known anywhere.
    best: Cost,
    step: Cost,
    outcome: Outcome,
}

impl Run {
    /// Returns the largest value that is an improvement.
    fn target(&self) -> Cost {
        round_up(self.best, self.step) - self.step
    }

    /// Evaluates every completion of a path.
    fn try_completions(&mut self, instance: &Instance, path: &[Placement]) {
        let size = instance.size();
        let mut permutation = [0_u8; MAX_SIZE];
        let (mut locations, mut facilities) = (0_u64, 0_u64);
        for placement in path {
            permutation[usize::from(placement.location)] = placement.facility;
            locations |= 1 << placement.location;
            facilities |= 1 << placement.facility;
        }
        let free = |taken: u64| (0..size).filter(move |index| taken >> index & 1 == 0);
        let locations: Vec<usize> = free(locations).collect();
        self.try_rest(
            instance,
            &mut permutation[..size],
            &locations,
            free(facilities).fold(0, |set, facility| set | 1 << facility),
        );
    }

    fn try_rest(
        &mut self,
        instance: &Instance,
        permutation: &mut [u8],
        locations: &[usize],
        facilities: u64,
    ) {
        let Some((&location, locations)) = locations.split_first() else {
            let value = instance.evaluate(permutation);
            if value < self.best {
                self.best = value;
                self.outcome.best = Some(Solution {
                    value,
                    permutation: permutation.to_vec(),
                });
            }
            return;
        };
        let mut left = facilities;
        while left != 0 {
            let facility = left.trailing_zeros();
            left &= left - 1;
            permutation[location] = facility as u8;
            self.try_rest(
                instance,
                permutation,
                locations,
                facilities & !(1 << facility),
            );
        }
    }
}
