//! Placement queries: which hosts would accept a task (`Request::CanMigrate`). Nothing is frozen,
//! and nothing changes anywhere.
//!
//! 1. The requesting task's daemon asks the host of the task to inspect it.
//! 2. The requesting task's daemon sends the task's properties to all candidate hosts at the same
//!    time and asks for their verdicts.
//! 3. On each candidate host, the daemon checks the policy of the host's owner, and the tasker
//!    checks everything else.
//! 4. When all hosts have answered, or after `PLACEMENT_QUERY_TIMEOUT`, the requesting task gets
//!    the reply.

use super::restart_engine::{RestartVerdict, WorldCall, choose_engine};
use super::rpc::{ReplyAddress, RpcPurpose};
use super::{Machine, Timer};
use sempa_proto::engine::Engine;
use sempa_proto::host::{HostReply, HostRequest};
use sempa_proto::migration::{MigrationTargets, Refusal, TaskFacts, Verdict};
use sempa_proto::task::Reply;
use sempa_proto::tasker::ToTasker;
use sempa_proto::{HostId, Micros, PvmError, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Largest number of queries of one daemon at a time; further ones are refused.
const PLACEMENT_QUERIES_MAX: usize = 64;
/// Time limit for all answers. A tasker that has just started tests its engine before it answers,
/// and reads executables that it has not seen before.
const PLACEMENT_QUERY_TIMEOUT: Micros = Micros::from_secs(30);

/// A query of a task of this host.
#[derive(Debug)]
struct PlacementQuery {
    requester: Tid,
    id: RequestId,
    task: Tid,
    source: HostId,
    resident_bytes: u64,
    /// Hosts that have not answered.
    unanswered_hosts: BTreeSet<HostId>,
    verdicts: BTreeMap<HostId, Verdict>,
    engines: Vec<(HostId, Engine)>,
}

/// The queries of this host's tasks, and the requests to this host's tasker on behalf of any
/// daemon.
#[derive(Debug, Default)]
pub(super) struct PlacementQueries {
    pending: BTreeMap<u64, PlacementQuery>,
    last_query_number: u64,
    /// Requests that the tasker has not answered, by the id of the request.
    tasker_requests: BTreeMap<RequestId, TaskerRequest>,
    last_tasker_request: RequestId,
}

/// A request to the tasker, with its requester.
#[derive(Debug)]
enum TaskerRequest {
    Inspect(ReplyAddress, Tid),
    /// A request for the tasker's verdict. It contains the objections of the daemon itself, and the
    /// verdict on restarting the program instead.
    Verdict(ReplyAddress, Verdict, RestartVerdict),
}

impl PlacementQueries {
    fn add_tasker_request(&mut self, asked: TaskerRequest) -> RequestId {
        self.last_tasker_request = self.last_tasker_request.next();
        self.tasker_requests.insert(self.last_tasker_request, asked);
        self.last_tasker_request
    }
}

impl Machine {
    /// Starts a query: which hosts would accept a task, or, if `to` is given, whether that host
    /// would.
    pub(super) fn start_placement_query(
        &mut self,
        requester: Tid,
        id: RequestId,
        task: Tid,
        to: Option<&str>,
    ) {
        if self.placement_queries.pending.len() >= PLACEMENT_QUERIES_MAX {
            let reason = format!(
                "{PLACEMENT_QUERIES_MAX} such questions wait for their answers already; ask again later"
            );
            return self.reply_error(requester, id, PvmError::OutOfRes, reason);
        }
        let candidates = match to.map(|name| self.host_by_name(name)) {
            Some(None) => {
                let reason = format!(
                    "{task} cannot move to {}: {}",
                    to.unwrap_or_default(),
                    Refusal::NoSuchHost
                );
                return self.reply_error(requester, id, PvmError::NoHost, reason);
            }
            Some(Some(host)) => BTreeSet::from([host]),
            None => self.table.hosts.iter().map(|host| host.id).collect(),
        };
        let Some(source) = self
            .location(task)
            .filter(|host| task.is_task() && self.table.get(*host).is_some())
        else {
            return self.reply(
                requester,
                id,
                Reply::MigrationTargets(Err(Refusal::NoSuchTask)),
            );
        };
        self.placement_queries.last_query_number += 1;
        let number = self.placement_queries.last_query_number;
        let open = PlacementQuery {
            requester,
            id,
            task,
            source,
            resident_bytes: 0,
            unanswered_hosts: candidates,
            verdicts: BTreeMap::new(),
            engines: Vec::new(),
        };
        self.placement_queries.pending.insert(number, open);
        self.set_timer(PLACEMENT_QUERY_TIMEOUT, Timer::PlacementQuery(number));
        self.call_host_of_task(
            task,
            HostRequest::Inspect { tid: task },
            RpcPurpose::Inspection(number),
        );
    }

    /// Handles the properties of the task, or the reason why it cannot migrate at all. `result` is
    /// `None` if the task's host is lost.
    pub(super) fn handle_query_facts(
        &mut self,
        query: u64,
        from: HostId,
        result: Option<Result<TaskFacts, Refusal>>,
    ) {
        let Some(open) = self.placement_queries.pending.get_mut(&query) else {
            return;
        };
        let facts = match result.unwrap_or(Err(Refusal::HostLost(open.source))) {
            Ok(facts) => facts,
            Err(refusal) => return self.reply_placement_query(query, Err(refusal)),
        };
        (open.source, open.resident_bytes) = (from, facts.resident_bytes);
        open.unanswered_hosts.remove(&from);
        let hosts: Vec<HostId> = open.unanswered_hosts.iter().copied().collect();
        if hosts.is_empty() {
            return self.complete_placement_query(query);
        }
        for host in hosts {
            let question = HostRequest::Verdict {
                facts: facts.clone(),
            };
            self.call_host(host, question, RpcPurpose::Verdict { query, host });
        }
    }

    /// Handles a host's objections to the task. `answer` is `None` if the host is lost.
    pub(super) fn handle_query_verdict(
        &mut self,
        query: u64,
        host: HostId,
        answer: Option<(Verdict, Engine)>,
    ) {
        let Some(open) = self.placement_queries.pending.get_mut(&query) else {
            return;
        };
        if open.unanswered_hosts.remove(&host) {
            let (verdict, engine) =
                answer.unwrap_or_else(|| (vec![Refusal::HostLost(host)], Engine::Criu));
            open.engines
                .extend(verdict.is_empty().then_some((host, engine)));
            open.verdicts.insert(host, verdict);
        }
        if open.unanswered_hosts.is_empty() {
            self.complete_placement_query(query);
        }
    }

    /// Ends the query. Hosts that have not answered count as lost.
    pub(super) fn handle_placement_query_timeout(&mut self, query: u64) {
        let Some(open) = self.placement_queries.pending.get_mut(&query) else {
            return;
        };
        if open.verdicts.is_empty() && open.unanswered_hosts.contains(&open.source) {
            let from = open.source;
            return self.reply_placement_query(query, Err(Refusal::HostLost(from)));
        }
        for host in std::mem::take(&mut open.unanswered_hosts) {
            open.verdicts.insert(host, vec![Refusal::HostLost(host)]);
        }
        self.complete_placement_query(query);
    }

    fn complete_placement_query(&mut self, query: u64) {
        let Some(open) = self.placement_queries.pending.get_mut(&query) else {
            return;
        };
        let (tid, from, resident_bytes) = (open.task, open.source, open.resident_bytes);
        let mut verdicts: Vec<(HostId, Verdict)> =
            std::mem::take(&mut open.verdicts).into_iter().collect();
        let engines = std::mem::take(&mut open.engines);
        let zone = |host: HostId| {
            self.table
                .get(host)
                .map(sempa_proto::table::HostEntry::network_zone)
        };
        let here = zone(from);
        verdicts.sort_by_key(|(host, _)| (zone(*host) != here, *host));
        self.reply_placement_query(
            query,
            Ok(MigrationTargets {
                tid,
                from,
                resident_bytes,
                verdicts,
                engines,
            }),
        );
    }

    fn reply_placement_query(&mut self, query: u64, result: Result<MigrationTargets, Refusal>) {
        if let Some(open) = self.placement_queries.pending.remove(&query) {
            self.reply(open.requester, open.id, Reply::MigrationTargets(result));
        }
    }

    // ---- requests of other daemons about this host and its tasks

    /// Inspects a task of this host for a query.
    pub(super) fn inspect_for_query(&mut self, back: ReplyAddress, tid: Tid) {
        let migrating = self
            .migrations
            .sources
            .values()
            .find(|source| source.migration().tid == tid && source.is_departing());
        let refusal = migrating
            .map(|source| Refusal::AlreadyMigrating(source.migration().id))
            .or_else(|| self.migration_refusal(tid));
        if let Some(refusal) = refusal {
            return self.send_host_reply(back, HostReply::Inspected(Err(refusal)));
        }
        if let Some(result) = self.inspect_without_criu(tid, None) {
            return self.send_host_reply(
                back,
                HostReply::Inspected(self.add_program_name(tid, result)),
            );
        }
        let question = self
            .placement_queries
            .add_tasker_request(TaskerRequest::Inspect(back, tid));
        self.send_to_tasker(ToTasker::QueryInspect {
            query: question,
            tid,
        });
    }

    /// Adds the name of the task's program to its properties: owners of other hosts may not permit
    /// the program.
    pub(super) fn add_program_name(
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

    /// Starts to determine whether this host would accept a task with these properties.
    pub(super) fn judge_for_query(&mut self, back: ReplyAddress, facts: TaskFacts) {
        let objections: Verdict = self
            .guest_refusal(Tid::NONE, &facts.program)
            .into_iter()
            .chain(self.no_tasker_refusal())
            .collect();
        if self.tasker_gone {
            return self.answer_verdict(back, objections, Engine::Criu);
        }
        self.world_calls
            .push_back(WorldCall::JudgeQuery(back, objections, facts));
    }

    /// Asks the tasker for its objections to a migration by CRIU.
    pub(super) fn request_tasker_verdict(
        &mut self,
        back: ReplyAddress,
        objections: Verdict,
        other: RestartVerdict,
        facts: TaskFacts,
    ) {
        let question = self
            .placement_queries
            .add_tasker_request(TaskerRequest::Verdict(back, objections, other));
        self.send_to_tasker(ToTasker::QueryVerdict {
            query: question,
            facts,
        });
    }

    /// Answers with all objections of this host.
    pub(super) fn answer_verdict(&mut self, back: ReplyAddress, verdict: Verdict, engine: Engine) {
        self.send_host_reply(back, HostReply::Verdict(verdict, engine));
    }

    /// Handles the result of the tasker's inspection of a task.
    pub(super) fn handle_tasker_inspection(
        &mut self,
        question: RequestId,
        result: Result<TaskFacts, Refusal>,
    ) {
        if let Some(TaskerRequest::Inspect(back, tid)) =
            self.placement_queries.tasker_requests.remove(&question)
        {
            let result = result.map_err(|refusal| self.set_refusal_host(refusal));
            let result = self.merge_criu_facts(tid, None, result);
            self.send_host_reply(
                back,
                HostReply::Inspected(self.add_program_name(tid, result)),
            );
        }
    }

    /// Handles the tasker's verdict on a task.
    pub(super) fn handle_tasker_verdict(&mut self, question: RequestId, verdict: Verdict) {
        if let Some(TaskerRequest::Verdict(back, mut known, other)) =
            self.placement_queries.tasker_requests.remove(&question)
        {
            let verdict = verdict
                .into_iter()
                .map(|refusal| self.set_refusal_host(refusal))
                .collect();
            let (verdict, engine) = choose_engine(verdict, other);
            known.extend(verdict);
            self.answer_verdict(back, known, engine);
        }
    }

    /// Answers all open requests to the tasker after the tasker has ended.
    pub(super) fn fail_tasker_requests(&mut self) {
        let Some(refusal) = self.no_tasker_refusal() else {
            return;
        };
        for asked in std::mem::take(&mut self.placement_queries.tasker_requests).into_values() {
            match asked {
                TaskerRequest::Inspect(back, _) => {
                    self.send_host_reply(back, HostReply::Inspected(Err(refusal.clone())))
                }
                TaskerRequest::Verdict(back, mut known, _) => {
                    known.push(refusal.clone());
                    self.answer_verdict(back, known, Engine::Criu);
                }
            }
        }
    }
}
