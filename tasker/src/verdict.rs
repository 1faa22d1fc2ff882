//! Inspects a task and checks whether this host could run it, for a migration or a query. Nothing
//! is frozen or changed.

use crate::moves::NO_NAMESPACES;
use crate::supervisor::Supervisor;
use crate::workers::Outcome;
use checkpoint::engine::Cancel;
use checkpoint::facts::{self, TaskProcesses, ThisHost};
use sempa_proto::migration::{Failure, Refusal, TaskFacts, Verdict};
use sempa_proto::tasker::{FromTasker, ToTasker};
use sempa_proto::{HostId, MigrationId, RequestId, Tid};

/// The reason of a check, which determines where its result goes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum For {
    /// A migration of this task.
    Move { migration: MigrationId, tid: Tid },
    /// A query without a migration.
    Question(RequestId),
}

/// True for orders that are answered only after the engine has been probed.
pub(crate) fn needs_engine(order: &ToTasker) -> bool {
    use ToTasker as T;
    matches!(
        order,
        T::Inspect { .. } | T::Look { .. } | T::Prepare { .. } | T::Judge { .. }
    )
}

impl Supervisor {
    fn no_engine(&self) -> Option<Refusal> {
        // The daemon replaces the host: the tasker does not know its own.
        self.moves
            .engine_state()
            .err()
            .map(|why| Refusal::NoEngine {
                host: HostId::MASTER,
                why,
            })
    }

    /// Inspects a task on a worker; [`Supervisor::seen`] gets the result.
    pub(crate) fn look(&mut self, by: For, tid: Tid) {
        let refused = match (self.tasks.get(&tid), self.no_engine()) {
            (None, _) => Some(Refusal::NoSuchTask),
            (Some(_), no_engine) => no_engine,
        };
        let namespace = self
            .tasks
            .get(&tid)
            .and_then(|task| task.namespace.as_ref().map(|n| (n, task.process.pid)));
        let (None, Some((namespace, pid))) = (&refused, namespace) else {
            let refused = refused.unwrap_or(Refusal::Holds {
                what: NO_NAMESPACES.into(),
            });
            return self.seen(by, Err(refused));
        };
        let subject = TaskProcesses {
            root: pid,
            processes: namespace.pids(),
        };
        let engine = self.moves.engine_state().unwrap_or_default();
        let hashes = self.moves.hashes.clone();
        let work = move || Outcome::Seen {
            by,
            result: facts::inspect(&subject, engine, &hashes),
        };
        if let Err(why) = self.begin_uncancelled(work) {
            self.seen(
                by,
                Err(Refusal::Holds {
                    what: format!("something that could not be looked at: {why}"),
                }),
            );
        }
    }

    /// Reports the result of an inspection.
    pub(crate) fn seen(&mut self, by: For, result: Result<TaskFacts, Refusal>) {
        self.say(&match by {
            For::Move { migration, tid } => {
                let facts = result.as_ref().ok();
                let memory_can_follow =
                    facts.is_some_and(|facts| self.moves.following.should(facts));
                let can_pre_copy =
                    facts.is_some_and(|facts| self.moves.pre_copies.should(tid, facts));
                FromTasker::Inspected {
                    migration,
                    result,
                    memory_can_follow,
                    can_pre_copy,
                }
            }
            For::Question(question) => FromTasker::Seen { question, result },
        });
    }

    /// Checks on a worker whether this host could run a task; [`Supervisor::judged`] gets the
    /// result.
    pub(crate) fn judge(&mut self, by: For, facts: TaskFacts) {
        if let Some(refusal) = self.no_engine() {
            return self.judged(by, vec![refusal]);
        }
        // Tasks that are being checked count as reserved: of two tasks that do not fit together
        // only one may be accepted.
        let promised = self.promised_bytes();
        if let For::Move { migration, .. } = by {
            self.moves.promised.make(migration, facts.resident_bytes);
        }
        let host = ThisHost::new(self.moves.hashes.clone(), promised);
        let work = move || Outcome::Judged {
            by,
            verdict: facts::judge_task(&facts, &host),
        };
        if let Err(why) = self.begin_uncancelled(work) {
            self.judged(by, vec![no_room(&why)]);
        }
    }

    /// Reports the verdict. A migration with a good verdict gets its place on this host.
    pub(crate) fn judged(&mut self, by: For, mut verdict: Verdict) {
        let word = match by {
            For::Question(question) => FromTasker::Judged { question, verdict },
            For::Move { migration, tid } => {
                if verdict.is_empty()
                    && let Err(why) = self.make_room(migration, tid)
                {
                    verdict.push(no_room(&why));
                }
                self.moves.promised.judged(migration, verdict.is_empty());
                FromTasker::Prepared {
                    migration,
                    verdict,
                    memory_can_follow: self.moves.following.can(),
                }
            }
        };
        self.say(&word);
    }

    /// Starts a thread that is never cancelled.
    pub(crate) fn begin_uncancelled(
        &mut self,
        work: impl FnOnce() -> Outcome + Send + 'static,
    ) -> Result<u64, Failure> {
        let cancel = Cancel::new().map_err(|e| Failure::Io(format!("no descriptor: {e}")))?;
        self.moves.workers.start(&cancel, None, work)
    }
}

fn no_room(why: &Failure) -> Refusal {
    Refusal::NoEngine {
        host: HostId::MASTER,
        why: why.to_string(),
    }
}
