//! Placement queries: which hosts would accept a task (`Request::CanMigrate`). Nothing is frozen,
//! and nothing changes anywhere.
//!
//! 1. The requesting task's daemon asks the host of the task to inspect it.
//! 2. It sends the task's properties to all candidate hosts at the same time and asks for their
//!    verdicts.
//! 3. Each host's daemon knows its owner's policy; its tasker decides everything else.
//! 4. When all hosts have answered, or after `ANSWER_TIME`, the requesting task gets the reply.

use super::asks::{Asker, Back};
use super::engines::{Job, Other, choose};
use super::{Machine, Timer};
use sempa_proto::engine::Engine;
use sempa_proto::host::{HostReply, HostRequest};
use sempa_proto::migration::{MigrationTargets, Refusal, TaskFacts, Verdict};
use sempa_proto::task::Reply;
use sempa_proto::tasker::ToTasker;
use sempa_proto::{HostId, Micros, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Largest number of queries of one daemon at a time; further ones are refused.
const SURVEYS_MAX: usize = 64;
/// Time limit for all answers. A tasker that has just started tests its engine before it answers,
/// and reads executables that it has not seen before.
const ANSWER_TIME: Micros = Micros::from_secs(30);

/// A query of a task of this host.
#[derive(Debug)]
struct Open {
    by: Tid,
    id: RequestId,
    of: Tid,
    from: HostId,
    resident_bytes: u64,
    /// Hosts without an answer.
    missing: BTreeSet<HostId>,
    verdicts: BTreeMap<HostId, Verdict>,
    engines: Vec<(HostId, Engine)>,
}

/// The queries of this host's tasks, and the requests to this host's tasker on behalf of any
/// daemon.
#[derive(Debug, Default)]
pub(super) struct Surveys {
    open: BTreeMap<u64, Open>,
    last: u64,
    /// Requests that the tasker has not answered, with their requesters.
    asked: BTreeMap<RequestId, Asked>,
    last_asked: RequestId,
}

/// A request to the tasker, with its requester.
#[derive(Debug)]
enum Asked {
    Facts(Back, Tid),
    /// The objections of the daemon itself, and the verdict on restarting the program instead.
    Verdict(Back, Verdict, Other),
}

impl Surveys {
    fn ask(&mut self, asked: Asked) -> RequestId {
        self.last_asked = self.last_asked.next();
        self.asked.insert(self.last_asked, asked);
        self.last_asked
    }
}

impl Machine {
    /// Starts a query: which hosts would accept a task, or whether the host `to` would.
    pub(super) fn can_migrate(&mut self, by: Tid, id: RequestId, of: Tid, to: Option<&str>) {
        if self.surveys.open.len() >= SURVEYS_MAX {
            let reason = format!(
                "{SURVEYS_MAX} such questions wait for their answers already; ask again later"
            );
            return self.fail(by, id, PvmError::OutOfRes, reason);
        }
        let named = match to.map(|name| self.host_named(name)) {
            Some(None) => {
                let reason = format!(
                    "{of} cannot move to {}: {}",
                    to.unwrap_or_default(),
                    Refusal::NoSuchHost
                );
                return self.fail(by, id, PvmError::NoHost, reason);
            }
            Some(Some(host)) => BTreeSet::from([host]),
            None => self.table.hosts.iter().map(|host| host.id).collect(),
        };
        let Some(from) = self
            .location(of)
            .filter(|host| of.is_task() && self.table.get(*host).is_some())
        else {
            return self.reply(by, id, Reply::MigrationTargets(Err(Refusal::NoSuchTask)));
        };
        self.surveys.last += 1;
        let number = self.surveys.last;
        let open = Open {
            by,
            id,
            of,
            from,
            resident_bytes: 0,
            missing: named,
            verdicts: BTreeMap::new(),
            engines: Vec::new(),
        };
        self.surveys.open.insert(number, open);
        self.timer(ANSWER_TIME, Timer::Survey(number));
        self.ask_about(of, HostRequest::Inspect { tid: of }, Asker::Facts(number));
    }

    /// Handles the properties of the task, or the reason why it cannot migrate at all. `None`: its
    /// host is lost.
    pub(super) fn facts_answered(
        &mut self,
        number: u64,
        from: HostId,
        result: Option<Result<TaskFacts, Refusal>>,
    ) {
        let Some(open) = self.surveys.open.get_mut(&number) else {
            return;
        };
        let facts = match result.unwrap_or(Err(Refusal::HostLost(open.from))) {
            Ok(facts) => facts,
            Err(refusal) => return self.survey_over(number, Err(refusal)),
        };
        (open.from, open.resident_bytes) = (from, facts.resident_bytes);
        open.missing.remove(&from);
        let hosts: Vec<HostId> = open.missing.iter().copied().collect();
        if hosts.is_empty() {
            return self.survey_ended(number);
        }
        for host in hosts {
            let question = HostRequest::Verdict {
                facts: facts.clone(),
            };
            self.ask(
                host,
                question,
                Asker::Verdict {
                    survey: number,
                    host,
                },
            );
        }
    }

    /// Handles a host's objections to the task. `None`: the host is lost.
    pub(super) fn verdict_answered(
        &mut self,
        number: u64,
        host: HostId,
        answer: Option<(Verdict, Engine)>,
    ) {
        let Some(open) = self.surveys.open.get_mut(&number) else {
            return;
        };
        if open.missing.remove(&host) {
            let (verdict, engine) =
                answer.unwrap_or_else(|| (vec![Refusal::HostLost(host)], Engine::Criu));
            open.engines
                .extend(verdict.is_empty().then_some((host, engine)));
            open.verdicts.insert(host, verdict);
        }
        if open.missing.is_empty() {
            self.survey_ended(number);
        }
    }

    /// Ends the query. Hosts that have not answered count as lost.
    pub(super) fn survey_deadline(&mut self, number: u64) {
        let Some(open) = self.surveys.open.get_mut(&number) else {
            return;
        };
        if open.verdicts.is_empty() && open.missing.contains(&open.from) {
            let from = open.from;
            return self.survey_over(number, Err(Refusal::HostLost(from)));
        }
        for host in std::mem::take(&mut open.missing) {
            open.verdicts.insert(host, vec![Refusal::HostLost(host)]);
        }
        self.survey_ended(number);
    }

    fn survey_ended(&mut self, number: u64) {
        let Some(open) = self.surveys.open.get_mut(&number) else {
            return;
        };
        let (tid, from, resident_bytes) = (open.of, open.from, open.resident_bytes);
        let mut verdicts: Vec<(HostId, Verdict)> =
            std::mem::take(&mut open.verdicts).into_iter().collect();
        let engines = std::mem::take(&mut open.engines);
        let zone = |host: HostId| {
            self.table
                .get(host)
                .map(sempa_proto::table::HostEntry::zone)
        };
        let here = zone(from);
        verdicts.sort_by_key(|(host, _)| (zone(*host) != here, *host));
        self.survey_over(
            number,
            Ok(MigrationTargets {
                tid,
                from,
                resident_bytes,
                verdicts,
                engines,
            }),
        );
    }

    fn survey_over(&mut self, number: u64, result: Result<MigrationTargets, Refusal>) {
        if let Some(open) = self.surveys.open.remove(&number) {
            self.reply(open.by, open.id, Reply::MigrationTargets(result));
        }
    }

    // ---- requests of other daemons about this host and its tasks

    /// Inspects a task of this host for a query.
    pub(super) fn facts_wanted(&mut self, back: Back, tid: Tid) {
        let moving = self
            .moves
            .sources
            .values()
            .find(|source| source.migration().tid == tid && source.is_departing());
        let refusal = moving
            .map(|source| Refusal::AlreadyMigrating(source.migration().id))
            .or_else(|| self.cannot_move(tid));
        if let Some(refusal) = refusal {
            return self.answer(back, HostReply::Inspected(Err(refusal)));
        }
        if let Some(result) = self.facts_without_criu(tid, None) {
            return self.answer(back, HostReply::Inspected(self.with_program(tid, result)));
        }
        let question = self.surveys.ask(Asked::Facts(back, tid));
        self.tell_tasker(ToTasker::QueryInspect {
            query: question,
            tid,
        });
    }

    /// Adds the name of the task's program: owners of other hosts may not permit it.
    pub(super) fn with_program(
        &self,
        tid: Tid,
        result: Result<TaskFacts, Refusal>,
    ) -> Result<TaskFacts, Refusal> {
        let program = self
            .tasks
            .get(tid)
            .map(|task| task.name.as_str().into())
            .unwrap_or_default();
        result.map(|facts| TaskFacts { program, ..facts })
    }

    /// Starts to determine whether this host would accept such a task.
    pub(super) fn verdict_wanted(&mut self, back: Back, facts: TaskFacts) {
        let known: Verdict = self
            .no_guest(Tid::NONE, &facts.program)
            .into_iter()
            .chain(self.no_tasker())
            .collect();
        if self.tasker_gone {
            return self.verdict_known(back, known, Engine::Criu);
        }
        self.beginnings
            .push_back(Job::JudgeQuestion(back, known, facts));
    }

    /// Asks the tasker for its objections to a migration by CRIU.
    pub(super) fn ask_verdict(
        &mut self,
        back: Back,
        known: Verdict,
        other: Other,
        facts: TaskFacts,
    ) {
        let question = self.surveys.ask(Asked::Verdict(back, known, other));
        self.tell_tasker(ToTasker::QueryVerdict {
            query: question,
            facts,
        });
    }

    /// Answers with all objections of this host.
    pub(super) fn verdict_known(&mut self, back: Back, verdict: Verdict, engine: Engine) {
        self.answer(back, HostReply::Verdict(verdict, engine));
    }

    /// The tasker has inspected a task.
    pub(super) fn task_seen(&mut self, question: RequestId, result: Result<TaskFacts, Refusal>) {
        if let Some(Asked::Facts(back, tid)) = self.surveys.asked.remove(&question) {
            let result = result.map_err(|refusal| self.named(refusal));
            let result = self.facts_with_criu(tid, None, result);
            self.answer(back, HostReply::Inspected(self.with_program(tid, result)));
        }
    }

    /// The tasker has compared a task with this host.
    pub(super) fn task_judged(&mut self, question: RequestId, verdict: Verdict) {
        if let Some(Asked::Verdict(back, mut known, other)) = self.surveys.asked.remove(&question) {
            let verdict = verdict
                .into_iter()
                .map(|refusal| self.named(refusal))
                .collect();
            let (verdict, engine) = choose(verdict, other);
            known.extend(verdict);
            self.verdict_known(back, known, engine);
        }
    }

    /// Answers all open requests to the tasker, which has ended.
    pub(super) fn surveys_tasker_gone(&mut self) {
        let Some(refusal) = self.no_tasker() else {
            return;
        };
        for asked in std::mem::take(&mut self.surveys.asked).into_values() {
            match asked {
                Asked::Facts(back, _) => {
                    self.answer(back, HostReply::Inspected(Err(refusal.clone())))
                }
                Asked::Verdict(back, mut known, _) => {
                    known.push(refusal.clone());
                    self.verdict_known(back, known, Engine::Criu);
                }
            }
        }
    }
}
