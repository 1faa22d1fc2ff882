//! The group service (`pvm_joingroup` and the other group functions), kept by the master.
//!
//! [`Groups`] is a pure value: its inputs are requests and exits of tasks, its outputs are replies.
//! A barrier or a freeze is a request that stays open until enough members have arrived. It fails
//! if a member exits and the remaining ones are too few. A member that leaves the group by
//! `pvm_lvgroup` does not affect a barrier, because another task may join in its place.

use super::Machine;
use super::rpc::RpcPurpose;
use sempa_proto::checkpoint::SavedGroup;
use sempa_proto::group::{ALL_MEMBERS, GroupInfo, GroupReply, GroupRequest, GroupState, GroupWait};
use sempa_proto::host::HostRequest;
use sempa_proto::task::{NAME_BYTES_MAX, Reply};
use sempa_proto::{PvmError, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Largest number of memberships: sum over all groups of their members.
pub(super) const MEMBERSHIPS_MAX: usize = 1 << 20;
/// Largest total size of all group names, in bytes.
pub(super) const NAMES_BYTES_MAX: usize = 16 << 20;

type GroupError = (PvmError, String);
type GroupName = Arc<[u8]>;

/// The reply to a group request.
#[derive(Debug, PartialEq)]
pub(super) struct GroupAnswer {
    pub(super) tid: Tid,
    pub(super) id: RequestId,
    pub(super) result: Result<GroupReply, GroupError>,
}

/// Members that wait for each other in a barrier or a freeze.
#[derive(Debug)]
struct Rendezvous {
    required: usize,
    /// True for a barrier of all current members: it does not wait for a member that leaves the
    /// group.
    all_members: bool,
    waiting: BTreeMap<Tid, RequestId>,
}

impl Rendezvous {
    fn info(&self) -> GroupWait {
        GroupWait {
            required: self.required as u32,
            waiting: self.waiting.keys().copied().collect(),
        }
    }
}

/// The two requests in which members wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RendezvousKind {
    Barrier,
    Freeze,
}

#[derive(Debug, Default)]
struct Group {
    state: GroupState,
    /// Number of members at the time of the freeze; not used in a dynamic group.
    frozen_size: usize,
    /// Member by instance number; `NONE` for a free instance. In a dynamic group the last instance
    /// is always taken.
    members: Vec<Tid>,
    instances: BTreeMap<Tid, usize>,
    free_instances: BTreeSet<usize>,
    barrier: Option<Rendezvous>,
    freeze: Option<Rendezvous>,
}

impl Group {
    fn rendezvous(&mut self, kind: RendezvousKind) -> &mut Option<Rendezvous> {
        match kind {
            RendezvousKind::Barrier => &mut self.barrier,
            RendezvousKind::Freeze => &mut self.freeze,
        }
    }

    fn add(&mut self, tid: Tid) -> usize {
        let instance = self
            .free_instances
            .pop_first()
            .unwrap_or(self.members.len());
        if instance == self.members.len() {
            self.members.push(tid);
        } else {
            self.members[instance] = tid;
        }
        self.instances.insert(tid, instance);
        instance
    }

    /// Removes a member. A frozen group keeps its instance numbers and becomes broken.
    fn remove(&mut self, tid: Tid) {
        let Some(instance) = self.instances.remove(&tid) else {
            return;
        };
        self.members[instance] = Tid::NONE;
        self.free_instances.insert(instance);
        if self.state != GroupState::Dynamic {
            self.state = GroupState::Broken;
            return;
        }
        while self.members.last() == Some(&Tid::NONE) {
            self.members.pop();
            self.free_instances.remove(&self.members.len());
        }
    }

    /// Returns the number of members; for a frozen group, the number at the time of the freeze.
    fn size(&self) -> usize {
        if self.state == GroupState::Dynamic {
            self.instances.len()
        } else {
            self.frozen_size
        }
    }

    fn info(&self, name: &GroupName) -> GroupInfo {
        GroupInfo {
            name: name.to_vec(),
            state: self.state,
            members: self.members.clone(),
            barrier: self.barrier.as_ref().map(Rendezvous::info),
            freeze: self.freeze.as_ref().map(Rendezvous::info),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Groups {
    groups: BTreeMap<GroupName, Group>,
    groups_of_task: BTreeMap<Tid, BTreeSet<GroupName>>,
    memberships: usize,
    names_bytes: usize,
    replies: VecDeque<GroupAnswer>,
}

impl Groups {
    /// Returns all tasks that are in a group.
    pub(super) fn members(&self) -> impl Iterator<Item = Tid> {
        self.groups_of_task.keys().copied()
    }

    /// Returns the groups of these tasks, for a checkpoint. Waiting barriers and freezes are not
    /// included, because the tasks repeat these requests after a restart.
    pub(super) fn save(&self, tasks: &[Tid]) -> Vec<SavedGroup> {
        let tasks: BTreeSet<Tid> = tasks.iter().copied().collect();
        let member = |tid: &Tid| if tasks.contains(tid) { *tid } else { Tid::NONE };
        let save = |(name, group): (&GroupName, &Group)| SavedGroup {
            name: name.to_vec(),
            state: group.state,
            frozen_size: u32::try_from(group.frozen_size).unwrap_or(u32::MAX),
            members: group.members.iter().map(member).collect(),
        };
        let has_some = |group: &SavedGroup| group.members.iter().any(|tid| *tid != Tid::NONE);
        self.groups.iter().map(save).filter(has_some).collect()
    }

    /// Returns the requests that wait for other members.
    pub(super) fn open_requests(&self) -> impl Iterator<Item = (Tid, RequestId)> {
        let meetings = self
            .groups
            .values()
            .flat_map(|group| [&group.barrier, &group.freeze])
            .flatten();
        meetings.flat_map(|meeting| meeting.waiting.iter().map(|(tid, id)| (*tid, *id)))
    }

    /// Returns the names of those saved groups that already exist. Their saved members could not
    /// get their instance numbers again.
    pub(super) fn existing_names(&self, saved: &[SavedGroup]) -> Vec<String> {
        let taken = saved
            .iter()
            .filter(|group| self.groups.contains_key(&group.name[..]));
        taken.map(|group| display_name(&group.name)).collect()
    }

    /// Creates groups as they were saved. A group that already exists is left unchanged.
    pub(super) fn restore(&mut self, saved: &[SavedGroup]) {
        for SavedGroup {
            name,
            state,
            frozen_size: frozen,
            members,
        } in saved
        {
            let count = members.iter().filter(|tid| **tid != Tid::NONE).count();
            let fits =
                self.memberships + count <= MEMBERSHIPS_MAX && !self.groups.contains_key(&name[..]);
            let Some(name) = fits.then(|| self.reserve_name(name).ok()).flatten() else {
                continue;
            };
            let mut group = Group {
                state: *state,
                frozen_size: *frozen as usize,
                ..Group::default()
            };
            for (instance, tid) in members.iter().enumerate() {
                group.members.push(*tid);
                if *tid == Tid::NONE {
                    group.free_instances.insert(instance);
                } else {
                    group.instances.insert(*tid, instance);
                    self.groups_of_task
                        .entry(*tid)
                        .or_default()
                        .insert(name.clone());
                }
            }
            while group.state == GroupState::Dynamic && group.members.last() == Some(&Tid::NONE) {
                group.members.pop();
                group.free_instances.remove(&group.members.len());
            }
            self.memberships += count;
            self.groups.insert(name, group);
        }
    }

    /// Handles a request of a task. The reply comes from [`Groups::poll`], immediately or later.
    pub(super) fn handle(&mut self, tid: Tid, id: RequestId, request: GroupRequest) {
        let result = match request {
            GroupRequest::Join { group } => self.join(tid, &group),
            GroupRequest::Leave { group } => self.leave(tid, &group),
            GroupRequest::LeaveAll => {
                self.leave_all(tid, None);
                Ok(GroupReply::Number(0))
            }
            GroupRequest::Barrier { group, count } => {
                return self.enter_rendezvous(RendezvousKind::Barrier, (tid, id), &group, count);
            }
            GroupRequest::Freeze { group, count } => {
                return self.enter_rendezvous(RendezvousKind::Freeze, (tid, id), &group, count);
            }
            GroupRequest::Instance { group, tid } => self.instance(tid, &group),
            GroupRequest::Member { group, instance } => self.member(instance, &group),
            GroupRequest::Size { group } => self
                .get(&group)
                .map(|(_, g)| GroupReply::Number(g.size() as i32)),
            GroupRequest::Members { group } => self
                .get(&group)
                .map(|(_, g)| GroupReply::Members(g.members.clone())),
            GroupRequest::List => Ok(GroupReply::Groups(
                self.groups.iter().map(|(name, g)| g.info(name)).collect(),
            )),
        };
        self.answer(tid, id, result);
    }

    /// Returns the next reply, or `None`.
    pub(super) fn poll(&mut self) -> Option<GroupAnswer> {
        self.replies.pop_front()
    }

    /// Removes a task that has ended from all its groups.
    pub(super) fn remove_ended_task(&mut self, tid: Tid) {
        self.leave_all(
            tid,
            Some(&format!("{tid}, a member of the group, has ended")),
        );
    }

    fn answer(&mut self, tid: Tid, id: RequestId, result: Result<GroupReply, GroupError>) {
        self.replies.push_back(GroupAnswer { tid, id, result });
    }

    fn get(&self, name: &[u8]) -> Result<(&GroupName, &Group), GroupError> {
        self.groups.get_key_value(name).ok_or_else(|| {
            if name.is_empty() {
                (PvmError::NullGroup, "a group needs a name".to_string())
            } else {
                (
                    PvmError::NoGroup,
                    format!("there is no group {}", display_name(name)),
                )
            }
        })
    }

    fn join(&mut self, tid: Tid, name: &[u8]) -> Result<GroupReply, GroupError> {
        let known = match self.get(name) {
            Ok((name, group)) => Some((name.clone(), group)),
            Err((PvmError::NoGroup, _)) => None,
            Err(failed) => return Err(failed),
        };
        if let Some((_, group)) = &known {
            if group.state != GroupState::Dynamic {
                return Err((
                    PvmError::NotInGroup,
                    format!("group {} is frozen: nobody can join", display_name(name)),
                ));
            }
            if group.instances.contains_key(&tid) {
                return Err((
                    PvmError::DupGroup,
                    format!("{tid} is in group {} already", display_name(name)),
                ));
            }
        }
        if self.memberships >= MEMBERSHIPS_MAX {
            return Err((
                PvmError::OutOfRes,
                format!("all groups together have {MEMBERSHIPS_MAX} members at most"),
            ));
        }
        let name = match known {
            Some((name, _)) => name,
            None => self.reserve_name(name)?,
        };
        self.memberships += 1;
        self.groups_of_task
            .entry(tid)
            .or_default()
            .insert(name.clone());
        let instance = self.groups.entry(name).or_default().add(tid);
        Ok(GroupReply::Number(instance as i32))
    }

    /// Checks the name of a new group against the limits and reserves its bytes.
    fn reserve_name(&mut self, name: &[u8]) -> Result<GroupName, GroupError> {
        if name.len() > NAME_BYTES_MAX {
            return Err((
                PvmError::OutOfRes,
                format!("the name of a group has {NAME_BYTES_MAX} bytes at most"),
            ));
        }
        if self.names_bytes + name.len() > NAMES_BYTES_MAX {
            let reason =
                format!("the names of all groups together have {NAMES_BYTES_MAX} bytes at most");
            return Err((PvmError::OutOfRes, reason));
        }
        self.names_bytes += name.len();
        Ok(name.into())
    }

    fn leave(&mut self, tid: Tid, name: &[u8]) -> Result<GroupReply, GroupError> {
        let (name, group) = self.get(name)?;
        if !group.instances.contains_key(&tid) {
            return Err(not_in_group(tid, name));
        }
        let name = name.clone();
        self.remove(tid, &name, None);
        Ok(GroupReply::Number(0))
    }

    fn leave_all(&mut self, tid: Tid, ended: Option<&str>) {
        for name in self.groups_of_task.get(&tid).cloned().unwrap_or_default() {
            self.remove(tid, &name, ended);
        }
    }

    /// Removes a member. `ended` describes how it ended; `None` if it left the group by request.
    fn remove(&mut self, tid: Tid, name: &GroupName, ended: Option<&str>) {
        let Some(group) = self.groups.get_mut(name) else {
            return;
        };
        group.remove(tid);
        self.memberships -= 1;
        if let Some(names) = self.groups_of_task.get_mut(&tid) {
            names.remove(name);
            if names.is_empty() {
                self.groups_of_task.remove(&tid);
            }
        }
        for kind in [RendezvousKind::Barrier, RendezvousKind::Freeze] {
            self.update_rendezvous(tid, name, kind, ended);
        }
        if self
            .groups
            .get(name)
            .is_some_and(|group| group.instances.is_empty())
        {
            self.groups.remove(name);
            self.names_bytes -= name.len();
        }
    }

    /// Updates a barrier or a freeze after a member was removed.
    fn update_rendezvous(
        &mut self,
        tid: Tid,
        name: &GroupName,
        kind: RendezvousKind,
        ended: Option<&str>,
    ) {
        let Some(group) = self.groups.get_mut(name) else {
            return;
        };
        let (broken, left) = (group.state == GroupState::Broken, group.instances.len());
        let Some(meeting) = group.rendezvous(kind) else {
            return;
        };
        let own_request = meeting.waiting.remove(&tid);
        if meeting.all_members && ended.is_none() {
            meeting.required = meeting.required.min(left);
        }
        let wanted = meeting.required;
        // A task that has ended needs no reply.
        if let (Some(id), None) = (own_request, ended) {
            self.answer(tid, id, Err(not_in_group(tid, name)));
        }
        if broken || (ended.is_some() && left < wanted) {
            let what = ended.map_or_else(
                || format!("{tid} has left the frozen group"),
                str::to_string,
            );
            let reason = format!(
                "group {}: {what}; {left} are left of the {wanted} that were wanted",
                display_name(name)
            );
            self.finish(name, kind, &Err((PvmError::NoGroup, reason)));
        } else {
            self.finish_if_complete(name, kind);
            self.remove_if_empty(name, kind);
        }
    }

    /// Removes a barrier or a freeze without waiting members, so that the next one may require
    /// another number.
    fn remove_if_empty(&mut self, name: &GroupName, kind: RendezvousKind) {
        if let Some(group) = self.groups.get_mut(name) {
            group
                .rendezvous(kind)
                .take_if(|meeting| meeting.waiting.is_empty());
        }
    }

    fn instance(&self, tid: Tid, name: &[u8]) -> Result<GroupReply, GroupError> {
        let (name, group) = self.get(name)?;
        let instance = group
            .instances
            .get(&tid)
            .ok_or_else(|| not_in_group(tid, name))?;
        Ok(GroupReply::Number(*instance as i32))
    }

    fn member(&self, instance: i32, name: &[u8]) -> Result<GroupReply, GroupError> {
        let (name, group) = self.get(name)?;
        let member = usize::try_from(instance)
            .ok()
            .and_then(|i| group.members.get(i))
            .filter(|tid| **tid != Tid::NONE);
        let tid = member.ok_or_else(|| {
            (
                PvmError::NoInst,
                format!("group {} has no instance {instance}", display_name(name)),
            )
        })?;
        Ok(GroupReply::Number(tid.raw()))
    }

    /// Adds a member to a barrier or a freeze.
    fn enter_rendezvous(
        &mut self,
        kind: RendezvousKind,
        (tid, id): (Tid, RequestId),
        name: &[u8],
        count: i32,
    ) {
        match self.add_waiter(kind, (tid, id), name, count) {
            Ok(name) => self.finish_if_complete(&name, kind),
            Err(failed) => self.answer(tid, id, Err(failed)),
        }
    }

    fn add_waiter(
        &mut self,
        kind: RendezvousKind,
        (tid, id): (Tid, RequestId),
        name: &[u8],
        count: i32,
    ) -> Result<GroupName, GroupError> {
        let (name, group) = self.get(name)?;
        let name = name.clone();
        if !group.instances.contains_key(&tid) {
            return Err(not_in_group(tid, &name));
        }
        match (kind, group.state) {
            (RendezvousKind::Freeze, GroupState::Static | GroupState::Broken) => {
                return Err((
                    PvmError::DupGroup,
                    format!("group {} is frozen already", display_name(&name)),
                ));
            }
            (RendezvousKind::Barrier, GroupState::Broken) => {
                return Err((
                    PvmError::NoGroup,
                    format!(
                        "a member of the frozen group {} is missing",
                        display_name(&name)
                    ),
                ));
            }
            _ => {}
        }
        let all_members = kind == RendezvousKind::Barrier && count == ALL_MEMBERS;
        let size = group.instances.len();
        let wanted = if all_members {
            Some(size)
        } else {
            usize::try_from(count).ok().filter(|count| *count > 0)
        };
        let mismatch = |reason: String| {
            (
                PvmError::Mismatch,
                format!("group {}: {reason}", display_name(&name)),
            )
        };
        let required = wanted.ok_or_else(|| mismatch(format!("{count} members cannot meet")))?;
        let group = self.groups.get_mut(&name).expect("just found");
        let meeting = group.rendezvous(kind).get_or_insert(Rendezvous {
            required,
            all_members,
            waiting: BTreeMap::new(),
        });
        if meeting.waiting.contains_key(&tid) {
            return Err((
                PvmError::Already,
                format!("{tid} waits in group {} already", display_name(&name)),
            ));
        }
        if meeting.required != required && !(all_members && meeting.all_members) {
            return Err(mismatch(format!(
                "{} members are waited for, not {required}",
                meeting.required
            )));
        }
        meeting.waiting.insert(tid, id);
        Ok(name)
    }

    fn finish_if_complete(&mut self, name: &GroupName, kind: RendezvousKind) {
        let Some(group) = self.groups.get_mut(name) else {
            return;
        };
        let Some(meeting) = group
            .rendezvous(kind)
            .as_ref()
            .filter(|m| m.waiting.len() >= m.required)
        else {
            return;
        };
        let number = match kind {
            RendezvousKind::Barrier => 0,
            RendezvousKind::Freeze => meeting.required as i32,
        };
        if kind == RendezvousKind::Freeze {
            (group.state, group.frozen_size) = (GroupState::Static, group.instances.len());
        }
        self.finish(name, kind, &Ok(GroupReply::Number(number)));
    }

    /// Replies to all members that wait.
    fn finish(
        &mut self,
        name: &GroupName,
        kind: RendezvousKind,
        result: &Result<GroupReply, GroupError>,
    ) {
        let Some(meeting) = self
            .groups
            .get_mut(name)
            .and_then(|group| group.rendezvous(kind).take())
        else {
            return;
        };
        for (tid, id) in meeting.waiting {
            self.answer(tid, id, result.clone());
        }
    }
}

fn display_name(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

fn not_in_group(tid: Tid, name: &[u8]) -> GroupError {
    (
        PvmError::NotInGroup,
        format!("{tid} is not in group {}", display_name(name)),
    )
}

impl Machine {
    /// Master: handles a request to the group service.
    pub(super) fn group_request(&mut self, tid: Tid, id: RequestId, request: GroupRequest) {
        let Some(master) = &mut self.master else {
            return;
        };
        let joins = matches!(request, GroupRequest::Join { .. });
        master.groups.handle(tid, id, request);
        self.send_group_replies();
        if joins {
            // The notice of the task's exit comes on another channel and may have overtaken this
            // request.
            self.call_host_of_task(
                tid,
                HostRequest::Watch { tid, watcher: tid },
                RpcPurpose::GroupMember { tid },
            );
        }
    }

    /// Master: removes a task that has ended from its groups.
    pub(super) fn remove_ended_member(&mut self, tid: Tid) {
        let Some(master) = &mut self.master else {
            return;
        };
        master.groups.remove_ended_task(tid);
        self.send_group_replies();
    }

    fn send_group_replies(&mut self) {
        while let Some(GroupAnswer { tid, id, result }) =
            self.master.as_mut().and_then(|m| m.groups.poll())
        {
            match result {
                Ok(reply) => self.reply(tid, id, Reply::Group(reply)),
                Err((error, reason)) => self.reply_error(tid, id, error, reason),
            }
        }
    }
}

#[cfg(test)]
#[path = "tests/groups.rs"]
mod tests;
