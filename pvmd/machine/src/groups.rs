//! The group service (`pvm_joingroup` and the other group functions), provided by the master.
//!
//! [`Groups`] does no I/O: its inputs are requests and exits of tasks, its outputs are replies. A
//! barrier or a freeze is a request that stays open until enough members have arrived. It fails if
//! a member exits and too few members remain. A member that leaves the group by `pvm_lvgroup` does
//! not affect a barrier, because another task may join in its place.

use super::Machine;
use super::rpc::RpcPurpose;
use super::service_order::ServiceObject;
use sempa_proto::checkpoint::SavedGroup;
use sempa_proto::group::{
    ALL_MEMBERS, GroupInfo, GroupReply, GroupRequest, GroupState, GroupWait, NO_MEMBER,
};
use sempa_proto::host::HostRequest;
use sempa_proto::task::{Reply, TEXT_FIELD_BYTES_MAX};
use sempa_proto::{PvmError, RequestId, Tid};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Largest number of memberships, that is, the sum of the member counts of all groups.
pub(super) const MEMBERSHIPS_MAX: usize = 1 << 20;
/// Largest total size of all group names, in bytes.
pub(super) const NAMES_BYTES_MAX: usize = 16 << 20;

type GroupError = (PvmError, String);
type GroupName = Arc<[u8]>;

/// The reply to a group request of a task.
#[derive(Debug, PartialEq)]
pub struct GroupAnswer {
    pub tid: Tid,
    pub id: RequestId,
    /// The error has a code and a sentence.
    pub result: Result<GroupReply, GroupError>,
}

/// Members that wait for each other in a barrier or a freeze.
#[derive(Debug)]
struct Rendezvous {
    required_count: usize,
    /// True for a barrier or a freeze of all current members. It does not wait for a member that
    /// leaves the group.
    includes_all_members: bool,
    waiting_requests: BTreeMap<Tid, RequestId>,
}

impl Rendezvous {
    fn group_wait(&self) -> GroupWait {
        GroupWait {
            required_members: self.required_count as u32,
            waiting_members: self.waiting_requests.keys().copied().collect(),
        }
    }
}

/// The two kinds of requests in which members wait for each other.
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

    /// Returns the lowest free instance number, which the next member gets.
    fn next_instance(&self) -> usize {
        let first_hole = self.free_instances.first().copied();
        first_hole.unwrap_or(self.members.len())
    }

    fn add_member(&mut self, tid: Tid) -> usize {
        let instance = self.next_instance();
        self.free_instances.remove(&instance);
        if instance == self.members.len() {
            self.members.push(tid);
        } else {
            self.members[instance] = tid;
        }
        self.instances.insert(tid, instance);
        instance
    }

    /// Removes a member. A frozen group keeps its instance numbers and becomes broken.
    fn remove_member(&mut self, tid: Tid) {
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
    fn member_count(&self) -> usize {
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
            barrier: self.barrier.as_ref().map(Rendezvous::group_wait),
            freeze: self.freeze.as_ref().map(Rendezvous::group_wait),
        }
    }
}

/// The groups of a virtual machine, or of another group server.
#[derive(Debug, Default)]
pub struct Groups {
    groups: BTreeMap<GroupName, Group>,
    groups_of_task: BTreeMap<Tid, BTreeSet<GroupName>>,
    membership_count: usize,
    names_bytes: usize,
    replies: VecDeque<GroupAnswer>,
}

impl Groups {
    /// Returns all tasks that are members of a group.
    pub(super) fn all_members(&self) -> impl Iterator<Item = Tid> {
        self.groups_of_task.keys().copied()
    }

    /// Returns the groups of these tasks, for a checkpoint. Waiting barriers and freezes are not
    /// included, because the tasks repeat these requests after a restart.
    pub(super) fn saved_groups(&self, member_tids: &[Tid]) -> Vec<SavedGroup> {
        let member_tids: BTreeSet<Tid> = member_tids.iter().copied().collect();
        let saved_member = |tid: &Tid| {
            if member_tids.contains(tid) {
                *tid
            } else {
                Tid::NONE
            }
        };
        let saved_group = |(name, group): (&GroupName, &Group)| SavedGroup {
            name: name.to_vec(),
            state: group.state,
            frozen_size: u32::try_from(group.frozen_size).unwrap_or(u32::MAX),
            members: group.members.iter().map(saved_member).collect(),
        };
        let has_saved_member =
            |group: &SavedGroup| group.members.iter().any(|tid| *tid != Tid::NONE);
        self.groups
            .iter()
            .map(saved_group)
            .filter(has_saved_member)
            .collect()
    }

    /// Returns the requests that wait for other members of a group.
    pub(super) fn open_requests(&self) -> impl Iterator<Item = (Tid, RequestId)> {
        let rendezvous_list = self
            .groups
            .values()
            .flat_map(|group| [&group.barrier, &group.freeze])
            .flatten();
        rendezvous_list.flat_map(|rendezvous| {
            rendezvous
                .waiting_requests
                .iter()
                .map(|(tid, id)| (*tid, *id))
        })
    }

    /// Returns the names of the saved groups that already exist. A restart could not assign the
    /// saved instance numbers in these groups again.
    pub(super) fn existing_names(&self, saved_groups: &[SavedGroup]) -> Vec<String> {
        let existing_groups = saved_groups
            .iter()
            .filter(|group| self.groups.contains_key(&group.name[..]));
        existing_groups
            .map(|group| display_name(&group.name))
            .collect()
    }

    /// Creates saved groups again. A group that already exists is not changed.
    pub(super) fn restore_groups(&mut self, saved_groups: &[SavedGroup]) {
        for SavedGroup {
            name,
            state,
            frozen_size,
            members,
        } in saved_groups
        {
            let member_count = members.iter().filter(|tid| **tid != Tid::NONE).count();
            let fits_limits = self.membership_count + member_count <= MEMBERSHIPS_MAX
                && !self.groups.contains_key(&name[..]);
            let Some(name) = fits_limits.then(|| self.reserve_name(name).ok()).flatten() else {
                continue;
            };
            let mut group = Group {
                state: *state,
                frozen_size: *frozen_size as usize,
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
            self.membership_count += member_count;
            self.groups.insert(name, group);
        }
    }

    /// Handles a request of a task. [`Groups::next_reply`] returns the reply, immediately or later.
    pub fn handle_request(&mut self, tid: Tid, id: RequestId, request: GroupRequest) {
        let result = match request {
            GroupRequest::Join { group } => self.join(tid, &group),
            GroupRequest::Leave { group } => self.leave(tid, &group),
            GroupRequest::LeaveAll => {
                self.leave_all_groups(tid, None);
                Ok(GroupReply::Number(0))
            }
            GroupRequest::Barrier {
                group,
                required_members: count,
            } => {
                return self.enter_rendezvous(RendezvousKind::Barrier, (tid, id), &group, count);
            }
            GroupRequest::Freeze {
                group,
                required_members: count,
            } => {
                return self.enter_rendezvous(RendezvousKind::Freeze, (tid, id), &group, count);
            }
            GroupRequest::Instance { group, tid } => self.instance_of(tid, &group),
            GroupRequest::Member { group, instance } => self.member_with_instance(instance, &group),
            GroupRequest::Size { group } => self
                .find_group(&group)
                .map(|(_, g)| GroupReply::Number(g.member_count() as i32)),
            GroupRequest::Members { group } => self
                .find_group(&group)
                .map(|(_, g)| GroupReply::Members(g.members.clone())),
            GroupRequest::List => Ok(GroupReply::Groups(
                self.groups.iter().map(|(name, g)| g.info(name)).collect(),
            )),
        };
        self.queue_reply(tid, id, result);
    }

    /// Returns the next reply; `None` if no reply is due.
    pub fn next_reply(&mut self) -> Option<GroupAnswer> {
        self.replies.pop_front()
    }

    /// Removes a task that has ended from all its groups.
    pub fn remove_ended_task(&mut self, tid: Tid) {
        self.leave_all_groups(
            tid,
            Some(&format!("{tid}, a member of the group, has ended")),
        );
    }

    fn queue_reply(&mut self, tid: Tid, id: RequestId, result: Result<GroupReply, GroupError>) {
        self.replies.push_back(GroupAnswer { tid, id, result });
    }

    fn find_group(&self, name: &[u8]) -> Result<(&GroupName, &Group), GroupError> {
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
        let existing_group = match self.find_group(name) {
            Ok((name, group)) => Some((name.clone(), group)),
            Err((PvmError::NoGroup, _)) => None,
            Err(error) => return Err(error),
        };
        if let Some((_, group)) = &existing_group {
            if group.state != GroupState::Dynamic {
                return Err((
                    PvmError::NotInGroup,
                    format!("group {} is frozen: no task can join", display_name(name)),
                ));
            }
            if group.instances.contains_key(&tid) {
                return Err((
                    PvmError::DupGroup,
                    format!("{tid} is in group {} already", display_name(name)),
                ));
            }
        }
        if self.membership_count >= MEMBERSHIPS_MAX {
            return Err((
                PvmError::OutOfRes,
                format!("all groups together have {MEMBERSHIPS_MAX} members at most"),
            ));
        }
        let name = match existing_group {
            Some((name, _)) => name,
            None => self.reserve_name(name)?,
        };
        self.membership_count += 1;
        self.groups_of_task
            .entry(tid)
            .or_default()
            .insert(name.clone());
        let instance = self.groups.entry(name).or_default().add_member(tid);
        Ok(GroupReply::Number(instance as i32))
    }

    /// Checks the name of a new group against the limits and reserves its bytes.
    fn reserve_name(&mut self, name: &[u8]) -> Result<GroupName, GroupError> {
        if name.len() > TEXT_FIELD_BYTES_MAX {
            return Err((
                PvmError::OutOfRes,
                format!("the name of a group has {TEXT_FIELD_BYTES_MAX} bytes at most"),
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
        let (name, group) = self.find_group(name)?;
        if !group.instances.contains_key(&tid) {
            return Err(not_in_group(tid, name));
        }
        let name = name.clone();
        self.remove_from_group(tid, &name, None);
        Ok(GroupReply::Number(0))
    }

    fn leave_all_groups(&mut self, tid: Tid, end_reason: Option<&str>) {
        for name in self.groups_of_task.get(&tid).cloned().unwrap_or_default() {
            self.remove_from_group(tid, &name, end_reason);
        }
    }

    /// Removes a member from a group. `end_reason` describes how the member ended; `None` if the
    /// member left the group by request.
    fn remove_from_group(&mut self, tid: Tid, name: &GroupName, end_reason: Option<&str>) {
        let Some(group) = self.groups.get_mut(name) else {
            return;
        };
        group.remove_member(tid);
        self.membership_count -= 1;
        if let Some(names) = self.groups_of_task.get_mut(&tid) {
            names.remove(name);
            if names.is_empty() {
                self.groups_of_task.remove(&tid);
            }
        }
        for kind in [RendezvousKind::Barrier, RendezvousKind::Freeze] {
            self.update_rendezvous(tid, name, kind, end_reason);
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

    /// Updates a barrier or a freeze after the member `tid` was removed from the group. The barrier
    /// or freeze completes if enough members wait, and fails if too few members remain or the
    /// frozen group is broken.
    fn update_rendezvous(
        &mut self,
        tid: Tid,
        name: &GroupName,
        kind: RendezvousKind,
        end_reason: Option<&str>,
    ) {
        let Some(group) = self.groups.get_mut(name) else {
            return;
        };
        let (is_broken, remaining_count) =
            (group.state == GroupState::Broken, group.instances.len());
        let Some(rendezvous) = group.rendezvous(kind) else {
            return;
        };
        let own_request = rendezvous.waiting_requests.remove(&tid);
        if rendezvous.includes_all_members && end_reason.is_none() {
            rendezvous.required_count = rendezvous.required_count.min(remaining_count);
        }
        let required_count = rendezvous.required_count;
        // A task that has ended needs no reply.
        if let (Some(id), None) = (own_request, end_reason) {
            self.queue_reply(tid, id, Err(not_in_group(tid, name)));
        }
        if is_broken || (end_reason.is_some() && remaining_count < required_count) {
            let cause = end_reason.map_or_else(
                || format!("{tid} has left the frozen group"),
                str::to_string,
            );
            let reason = format!(
                "group {}: {cause}; {remaining_count} of the {required_count} required members remain",
                display_name(name)
            );
            self.finish_rendezvous(name, kind, &Err((PvmError::NoGroup, reason)));
        } else {
            self.finish_if_complete(name, kind);
            self.remove_if_empty(name, kind);
        }
    }

    /// Removes a barrier or a freeze that has no waiting members, so that the next barrier or
    /// freeze may require another number of members.
    fn remove_if_empty(&mut self, name: &GroupName, kind: RendezvousKind) {
        if let Some(group) = self.groups.get_mut(name) {
            group
                .rendezvous(kind)
                .take_if(|rendezvous| rendezvous.waiting_requests.is_empty());
        }
    }

    fn instance_of(&self, tid: Tid, name: &[u8]) -> Result<GroupReply, GroupError> {
        let (name, group) = self.find_group(name)?;
        let instance = if tid == NO_MEMBER {
            Some(group.next_instance())
        } else {
            group.instances.get(&tid).copied()
        };
        let instance = instance.ok_or_else(|| not_in_group(tid, name))?;
        Ok(GroupReply::Number(instance as i32))
    }

    fn member_with_instance(&self, instance: i32, name: &[u8]) -> Result<GroupReply, GroupError> {
        let (name, group) = self.find_group(name)?;
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

    /// Adds a member to a barrier or a freeze, and completes the barrier or freeze if enough
    /// members wait.
    fn enter_rendezvous(
        &mut self,
        kind: RendezvousKind,
        (tid, id): (Tid, RequestId),
        name: &[u8],
        count: i32,
    ) {
        match self.add_waiter(kind, (tid, id), name, count) {
            Ok(name) => self.finish_if_complete(&name, kind),
            Err(error) => self.queue_reply(tid, id, Err(error)),
        }
    }

    fn add_waiter(
        &mut self,
        kind: RendezvousKind,
        (tid, id): (Tid, RequestId),
        name: &[u8],
        count: i32,
    ) -> Result<GroupName, GroupError> {
        let (name, group) = self.find_group(name)?;
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
        let awaits_all_members = count == ALL_MEMBERS;
        let member_count = group.instances.len();
        let valid_count = if awaits_all_members {
            Some(member_count)
        } else {
            usize::try_from(count).ok().filter(|count| *count > 0)
        };
        let mismatch_error = |reason: String| {
            (
                PvmError::Mismatch,
                format!("group {}: {reason}", display_name(&name)),
            )
        };
        let required_member_count =
            valid_count.ok_or_else(|| mismatch_error(format!("{count} members cannot meet")))?;
        let group = self.groups.get_mut(&name).expect("just found");
        let rendezvous = group.rendezvous(kind).get_or_insert(Rendezvous {
            required_count: required_member_count,
            includes_all_members: awaits_all_members,
            waiting_requests: BTreeMap::new(),
        });
        if rendezvous.waiting_requests.contains_key(&tid) {
            return Err((
                PvmError::Already,
                format!("{tid} waits in group {} already", display_name(&name)),
            ));
        }
        if rendezvous.required_count != required_member_count {
            return Err(mismatch_error(format!(
                "{} members are waited for, not {required_member_count}",
                rendezvous.required_count
            )));
        }
        rendezvous.waiting_requests.insert(tid, id);
        Ok(name)
    }

    fn finish_if_complete(&mut self, name: &GroupName, kind: RendezvousKind) {
        let Some(group) = self.groups.get_mut(name) else {
            return;
        };
        let Some(rendezvous) = group
            .rendezvous(kind)
            .as_ref()
            .filter(|m| m.waiting_requests.len() >= m.required_count)
        else {
            return;
        };
        let reply_number = match kind {
            RendezvousKind::Barrier => 0,
            RendezvousKind::Freeze => rendezvous.required_count as i32,
        };
        if kind == RendezvousKind::Freeze {
            (group.state, group.frozen_size) = (GroupState::Static, group.instances.len());
        }
        self.finish_rendezvous(name, kind, &Ok(GroupReply::Number(reply_number)));
    }

    /// Completes a barrier or a freeze: sends `result` to all members that wait.
    fn finish_rendezvous(
        &mut self,
        name: &GroupName,
        kind: RendezvousKind,
        result: &Result<GroupReply, GroupError>,
    ) {
        let Some(rendezvous) = self
            .groups
            .get_mut(name)
            .and_then(|group| group.rendezvous(kind).take())
        else {
            return;
        };
        for (tid, id) in rendezvous.waiting_requests {
            self.queue_reply(tid, id, result.clone());
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
    pub(super) fn handle_group_request(&mut self, tid: Tid, id: RequestId, request: GroupRequest) {
        self.begin_service_use(tid, id, ServiceObject::of_group_request(&request));
        let Some(master) = &mut self.master else {
            return;
        };
        let is_join = matches!(request, GroupRequest::Join { .. });
        master.groups.handle_request(tid, id, request);
        self.send_group_replies();
        if is_join {
            // The exit notice of the task arrives on another channel and may have overtaken this
            // request. The watch makes the task's host report an exit that has already happened.
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
            self.master.as_mut().and_then(|m| m.groups.next_reply())
        {
            self.reply_in_order(tid, id, result.map(Reply::Group));
        }
    }
}

#[cfg(test)]
#[path = "tests/groups.rs"]
mod tests;
