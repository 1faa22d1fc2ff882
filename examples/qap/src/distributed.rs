//! The proof as a master-worker run: subproblems are tasks, and workers return what they did not
//! search within their time limit.
//!
//! The number of nodes of a run does not depend on the order of the tasks, on the number of workers
//! or on lost workers: an attempt that is lost adds no nodes, and the nodes of each subproblem
//! count once. If the first bound is the optimum, the number is that of the sequential search.

use crate::instance::{Cost, Instance, Solution};
use crate::proof::{Optimum, Proof};
use crate::search::{BoundKind, Directive, Node, Search};
use master_worker::{
    Driver, Failure, Grain, Nothing, ProgramOptions, RunHandle, RunOutcome, Task, TaskContext,
    Worker,
};
use serde::{Deserialize, Serialize};

/// Time limits of subproblems: few waiting subproblems must give some to idle workers soon.
const GRAIN: Grain = Grain {
    shortest: 50_000,
    longest: 5_000_000,
};

/// A part of the tree, with the best value known when it was made.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Subproblem {
    node: Node,
    best: Cost,
}

/// What the search of a subproblem found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Searched {
    nodes: u64,
    best: Option<Solution>,
}

impl Task for Subproblem {
    type Result = Searched;

    fn key(&self) -> f64 {
        self.node.bound as f64
    }
}

/// What a worker needs for all subproblems.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Problem {
    instance: Instance,
    bound: BoundKind,
}

/// State of the proof.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ProofDriver {
    problem: Problem,
    /// Only permutations below this value are of interest.
    best_value: Cost,
    best: Option<Solution>,
    nodes: u64,
    grain: Grain,
}

impl ProofDriver {
    /// Creates the driver of a proof. `first_solution` is a permutation of the value `best_value`,
    /// if one is known.
    pub fn new(
        instance: Instance,
        bound: BoundKind,
        best_value: Cost,
        first_solution: Option<Solution>,
    ) -> Self {
        Self {
            problem: Problem { instance, bound },
            best_value,
            best: first_solution,
            nodes: 0,
            grain: GRAIN,
        }
    }

    /// Sets the time limits of subproblems.
    #[must_use]
    pub fn with_grain(self, grain: Grain) -> Self {
        Self { grain, ..self }
    }

    /// Returns the result of a finished run.
    pub fn into_proof(self) -> Proof {
        Proof {
            optimum: match self.best {
                Some(solution) => Optimum::Solution(solution),
                None => Optimum::AtLeast(self.best_value),
            },
            nodes: self.nodes,
        }
    }
}

impl Driver for ProofDriver {
    type Task = Subproblem;
    type InitData = Problem;
    /// The best value that any worker has found.
    type Update = Cost;
    type Partial = Nothing;

    fn initial_tasks(
        &mut self,
        _run: &mut RunHandle<'_, Self>,
    ) -> Result<Vec<Subproblem>, Failure> {
        let search = Search::new(&self.problem.instance, self.problem.bound)?;
        Ok(vec![Subproblem {
            node: search.root(),
            best: self.best_value,
        }])
    }

    fn configure(&mut self, run: &mut RunHandle<'_, Self>) -> Result<(), Failure> {
        run.set_grain(Some(self.grain));
        run.update(&self.best_value)
    }

    fn init_data(&mut self) -> Result<Problem, Failure> {
        Ok(self.problem.clone())
    }

    fn on_result(
        &mut self,
        run: &mut RunHandle<'_, Self>,
        _task: Subproblem,
        result: Searched,
    ) -> Result<(), Failure> {
        self.nodes += result.nodes;
        if let Some(solution) = result.best
            && solution.value < self.best_value
        {
            self.best_value = solution.value;
            self.best = Some(solution);
            run.update(&self.best_value)?;
            // Values are whole numbers, so a subproblem must promise at least one less.
            run.prune((self.best_value - 1) as f64, false);
        }
        Ok(())
    }
}

/// Searches subproblems of one instance.
pub struct ProofWorker {
    search: Search,
    /// The best value known to this worker.
    best: Cost,
}

impl Worker for ProofWorker {
    type Task = Subproblem;
    type InitData = Problem;
    type Update = Cost;
    type Partial = Nothing;

    fn new(problem: Problem) -> Result<Self, Failure> {
        Ok(Self {
            search: Search::new(&problem.instance, problem.bound)?,
            best: Cost::MAX,
        })
    }

    fn execute(
        &mut self,
        task: Subproblem,
        context: &mut TaskContext<'_, '_, Self>,
    ) -> Result<Searched, Failure> {
        let mut failure = None;
        self.best = self.best.min(task.best);
        let best = &mut self.best;
        let outcome = self.search.search(&task.node, *best, |_| {
            match context.update() {
                Ok(Some(value)) if value < *best => {
                    *best = value;
                    return Directive::Improved(value);
                }
                Ok(_) => {}
                Err(error) => {
                    failure = Some(error);
                    return Directive::Stop;
                }
            }
            if context.is_time_over() {
                Directive::Stop
            } else {
                Directive::Continue
            }
        });
        if let Some(failure) = failure {
            return Err(failure);
        }
        if let Some(solution) = &outcome.best {
            self.best = self.best.min(solution.value);
        }
        for node in outcome.rest {
            context.return_task(&Subproblem {
                node,
                best: self.best,
            })?;
        }
        Ok(Searched {
            nodes: outcome.nodes,
            best: outcome.best,
        })
    }
}

/// Carries out the proof on the virtual machine, or executes subproblems if a master has started
/// this process.
///
/// # Errors
/// The run cannot begin or ended early.
pub fn prove(
    driver: ProofDriver,
    options: &ProgramOptions,
) -> Result<(ProofDriver, RunOutcome), Failure> {
    master_worker::run_program::<ProofDriver, ProofWorker>(driver, options)
}

/// Executes subproblems until the run releases this process.
///
/// # Errors
/// The run cannot be reached.
pub fn run_as_worker() -> Result<(), Failure> {
    master_worker::run_as_worker::<ProofWorker>(master_worker::Groups::ALL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nugent;
    use crate::proof::{FirstBound, ProofOptions, solve};

    /// The number of nodes is that of the sequential search, although the tree is cut into tasks.
    #[test]
    fn run_in_one_process_counts_the_nodes_of_the_sequential_search() {
        let nugent = nugent::find("nug12").expect("embedded");
        let instance = nugent.instance();
        let bound = BoundKind::GilmoreLawler;
        let sequential = solve(
            &instance,
            &ProofOptions {
                bound,
                first_bound: FirstBound::Value(nugent.optimum),
            },
            |_| Directive::Continue,
        )
        .expect("complete");
        let short = Grain {
            shortest: 100,
            longest: 100,
        };
        let driver = ProofDriver::new(instance, bound, nugent.optimum, None).with_grain(short);
        let options = ProgramOptions {
            in_process: true,
            ..ProgramOptions::new("nug12", 1)
        };
        let (driver, outcome) = prove(driver, &options).expect("finished");
        assert!(outcome.is_finished);
        assert!(
            outcome.statistics.counts.results_accepted > 1,
            "the tree was not cut"
        );
        assert_eq!(driver.into_proof().nodes, sequential.nodes);
    }
}
