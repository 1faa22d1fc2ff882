//! Places for requests to come: when they are given, and what is noted down when they are taken.

use super::Service;
use crate::api::VmApi;
use crate::decide::{Ask, Policy, Together, Wants, place};
use crate::grants::GRANT_SPAN;
use crate::recording::Input;
use crate::spawns::{Incoming, Rules};
use crate::store::record;
use sempa_proto::sm::{Grant, SM_GRANT, Taken, pack_grant, unpack_taken};
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Message, Micros, Tid};

impl<V: VmApi> Service<V> {
    /// A request for one task was answered.
    pub(super) fn answered(&mut self, from: &Incoming) {
        let now = self.vm.now();
        if self.grants.answered(now, from) {
            self.grant(now, from.src);
        }
    }

    /// Gives a task places for its next requests, if they need not be decided one by one: where tasks are counted, wait or go
    /// in turn, they are.
    fn grant(&mut self, now: Micros, task: Tid) {
        let conduct = self.options.conduct;
        let room = self.grants.room(now, task);
        let Some(next) = self.grants.next_of(task) else { return };
        let one_by_one = conduct.placing != Policy::Load || conduct.rules != Rules::default();
        if one_by_one || room == 0 || self.spawns.waiting() > 0 || !is_plain(&next.request) {
            return;
        }
        let snapshot = self.model.snapshot(now);
        let Incoming { user, request, caller, wid, .. } = next;
        let (wid, caller) = (*wid, *caller);
        let ask = Ask { peers: &[caller], ..Ask::of(*user, request, room as u32, caller) };
        let placement = place(snapshot, &ask);
        let hosts: Vec<HostId> = placement.hosts.iter().map_while(|host| host.ok()).collect();
        if hosts.is_empty() {
            return;
        }
        let mut attempt = record::attempt(&placement, snapshot);
        attempt.sentence = format!("said beforehand: {}", attempt.sentence);
        self.grants.give(task, &hosts, attempt);
        self.send(task, SM_GRANT, wid, pack_grant(&Grant { hosts, span: GRANT_SPAN }));
    }

    /// What was given does not hold any more, on this host or at all: tasks ask again.
    pub(super) fn take_grants_back(&mut self, host: Option<HostId>) {
        for (task, wid) in self.grants.take_back(host) {
            self.send(task, SM_GRANT, wid, pack_grant(&Grant { hosts: Vec::new(), span: GRANT_SPAN }));
        }
    }

    /// A daemon says that a task was started by a grant.
    pub(super) fn taken(&mut self, message: &Message) {
        let Ok(Taken { by, host, tid }) = unpack_taken(message.body.clone()) else { return };
        let now = self.vm.now();
        // Of one that is not known the event log tells all there is to know.
        let Some(granted) = self.grants.taken(now, by, message.wid, host) else { return };
        let name = self.model.snapshot(now).name(host);
        self.record_taken(&granted.from, tid);
        self.spawns.granted(granted.from, (host, name), tid, granted.attempt);
        if granted.renew {
            self.grant(now, by);
        }
    }

    /// As if it had been asked for: for a replay it has.
    fn record_taken(&mut self, from: &Incoming, tid: Tid) {
        let number = (from.src, tid.raw());
        let Incoming { caller, user, job, ref request, .. } = *from;
        self.record_input(|| Input::Spawn { number, caller, user, job, request: request.clone() });
        self.record_input(|| Input::Started { number, tids: vec![tid] });
    }
}

/// True for a request of which a few are placed as they would be one by one.
fn is_plain(request: &SpawnRequest) -> bool {
    Wants::of(request).is_ok_and(|wants| wants.rank.is_none() && wants.together == Together::Any)
}
