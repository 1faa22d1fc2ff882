//! Requests to the group service, and their replies. The master's daemon provides the service for
//! the whole virtual machine.

use crate::error::PvmError;
use crate::ids::Tid;
use serde::{Deserialize, Serialize};

/// Barrier count that means all current members.
pub const ALL_MEMBERS: i32 = -1;

/// A request of a task to the group service. Group names are bytes, as the program passes them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupRequest {
    /// Join under the lowest free instance number; an unknown name creates the group. →
    /// [`GroupReply::Number`]
    Join { group: Vec<u8> },
    /// Leave the group. → [`GroupReply::Number`]
    Leave { group: Vec<u8> },
    /// Leave all groups, before the task leaves the virtual machine. → [`GroupReply::Number`]
    LeaveAll,
    /// Wait until `count` members have called the barrier. → [`GroupReply::Number`], sent to all of
    /// them at that moment
    Barrier {
        group: Vec<u8>,
        /// Number of members that must call the barrier; [`ALL_MEMBERS`] means the current number
        /// of members.
        count: i32,
    },
    /// Wait until `count` members request the freeze; afterwards the group accepts no new members.
    /// → [`GroupReply::Number`]
    Freeze { group: Vec<u8>, count: i32 },
    /// Look up the instance number of a task. → [`GroupReply::Number`]
    Instance { group: Vec<u8>, tid: Tid },
    /// Look up the task with an instance number. → [`GroupReply::Number`]
    Member { group: Vec<u8>, instance: i32 },
    /// Count the members. → [`GroupReply::Number`]
    Size { group: Vec<u8> },
    /// List the members by instance. → [`GroupReply::Members`]
    Members { group: Vec<u8> },
    /// List all groups with members and state. → [`GroupReply::Groups`]
    List,
}

/// The reply to a [`GroupRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupReply {
    /// An instance, a tid, a size, or 0 for success.
    Number(i32),
    /// Members by instance number; [`Tid::NONE`] for a free instance.
    Members(Vec<Tid>),
    /// All groups, sorted by name.
    Groups(Vec<GroupInfo>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupState {
    /// Tasks may join and leave.
    #[default]
    Dynamic,
    /// Frozen: no task may join.
    Static,
    /// Frozen, and a member has left since the freeze.
    Broken,
}

/// A barrier or freeze that waits for more members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupWait {
    /// Number of members that must arrive.
    pub required: u32,
    /// Members that have arrived and wait.
    pub waiting: Vec<Tid>,
}

/// State of one group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupInfo {
    pub name: Vec<u8>,
    pub state: GroupState,
    /// Members by instance number; [`Tid::NONE`] for a free instance.
    pub members: Vec<Tid>,
    /// The barrier in progress, if any.
    pub barrier: Option<GroupWait>,
    /// The freeze in progress, if any.
    pub freeze: Option<GroupWait>,
}

impl GroupInfo {
    /// Counts the members, without free instances.
    pub fn size(&self) -> usize {
        self.members.iter().filter(|tid| **tid != Tid::NONE).count()
    }
}

/// Call numbers of the C function `sempa_group_request`. Through this function the group library
/// sends its requests via the task's library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum GroupCall {
    Join = 1,
    Leave = 2,
    /// [`GroupRequest::Barrier`]; the argument `number` is the count.
    Barrier = 3,
    /// [`GroupRequest::Freeze`]; the argument `number` is the count.
    Freeze = 4,
    /// [`GroupRequest::Instance`]; the argument `number` is the tid.
    Instance = 5,
    /// [`GroupRequest::Member`]; the argument `number` is the instance number.
    Member = 6,
    Size = 7,
    /// [`GroupRequest::Members`]; the returned list contains one tid per instance number.
    Members = 8,
    /// [`GroupRequest::List`]; the returned list is encoded by [`encode_group_list`].
    List = 9,
}

impl GroupCall {
    pub const ALL: [GroupCall; 9] = [
        GroupCall::Join,
        GroupCall::Leave,
        GroupCall::Barrier,
        GroupCall::Freeze,
        GroupCall::Instance,
        GroupCall::Member,
        GroupCall::Size,
        GroupCall::Members,
        GroupCall::List,
    ];

    /// Converts the call into a request. `number` is the call's integer argument; calls without one
    /// ignore it.
    pub fn to_request(self, group: Vec<u8>, number: i32) -> GroupRequest {
        match self {
            GroupCall::Join => GroupRequest::Join { group },
            GroupCall::Leave => GroupRequest::Leave { group },
            GroupCall::Barrier => GroupRequest::Barrier {
                group,
                count: number,
            },
            GroupCall::Freeze => GroupRequest::Freeze {
                group,
                count: number,
            },
            GroupCall::Instance => GroupRequest::Instance {
                group,
                tid: Tid::from_raw(number),
            },
            GroupCall::Member => GroupRequest::Member {
                group,
                instance: number,
            },
            GroupCall::Size => GroupRequest::Size { group },
            GroupCall::Members => GroupRequest::Members { group },
            GroupCall::List => GroupRequest::List,
        }
    }
}

impl TryFrom<i32> for GroupCall {
    type Error = PvmError;

    fn try_from(code: i32) -> Result<GroupCall, PvmError> {
        GroupCall::ALL
            .into_iter()
            .find(|call| *call as i32 == code)
            .ok_or(PvmError::BadParam)
    }
}

/// Encodes all groups as integers for a C caller, in the order of PVM's own list of groups.
///
/// Per group: length of the name, its bytes as one integer each, number of members, length of the
/// member list, barrier count (−1 without a barrier), number of waiting members; then the member
/// list (−1 for a free instance) and the waiting members.
pub fn encode_group_list(groups: &[GroupInfo]) -> Vec<i32> {
    let mut words = vec![groups.len() as i32];
    for group in groups {
        words.push(group.name.len() as i32);
        words.extend(group.name.iter().map(|byte| i32::from(*byte)));
        let waiting: &[Tid] = group.barrier.as_ref().map_or(&[], |b| &b.waiting);
        let wanted = group.barrier.as_ref().map_or(-1, |b| b.required as i32);
        words.extend([
            group.size() as i32,
            group.members.len() as i32,
            wanted,
            waiting.len() as i32,
        ]);
        words.extend(
            group
                .members
                .iter()
                .map(|tid| if *tid == Tid::NONE { -1 } else { tid.raw() }),
        );
        words.extend(waiting.iter().map(|tid| tid.raw()));
    }
    words
}

/// Calls of the group library that can be traced. The trace record contains the argument named here
/// and the result, as in PVM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum TracedGroupCall {
    Join,
    Leave,
    /// `pvm_barrier`; the argument is the count.
    Barrier,
    /// `pvm_bcast`; the argument is the tag.
    Bcast,
    /// `pvm_getinst`; the argument is the tid.
    Instance,
    /// `pvm_gettid`; the argument is the instance.
    Member,
    Size,
    /// `pvm_gather`; the argument is the tag.
    Gather,
    /// `pvm_scatter`; the argument is the tag.
    Scatter,
    /// `pvm_reduce`; the argument is the tag.
    Reduce,
}

impl TracedGroupCall {
    pub const ALL: [TracedGroupCall; 10] = [
        TracedGroupCall::Join,
        TracedGroupCall::Leave,
        TracedGroupCall::Barrier,
        TracedGroupCall::Bcast,
        TracedGroupCall::Instance,
        TracedGroupCall::Member,
        TracedGroupCall::Size,
        TracedGroupCall::Gather,
        TracedGroupCall::Scatter,
        TracedGroupCall::Reduce,
    ];

    /// Returns the name of the event, the name of the trace item for the argument (`None` if the
    /// call has no argument), and the name of the trace item for the result.
    pub fn trace_names(self) -> (&'static str, Option<&'static str>, &'static str) {
        match self {
            TracedGroupCall::Join => ("joingroup", None, "CC"),
            TracedGroupCall::Leave => ("lvgroup", None, "CC"),
            TracedGroupCall::Barrier => ("barrier", Some("GBC"), "CC"),
            TracedGroupCall::Bcast => ("bcast", Some("MC"), "CC"),
            TracedGroupCall::Instance => ("getinst", Some("GT"), "GI"),
            TracedGroupCall::Member => ("gettid", Some("GI"), "GT"),
            TracedGroupCall::Size => ("gsize", None, "GS"),
            TracedGroupCall::Gather => ("gather", Some("MC"), "CC"),
            TracedGroupCall::Scatter => ("scatter", Some("MC"), "CC"),
            TracedGroupCall::Reduce => ("reduce", Some("MC"), "CC"),
        }
    }
}

impl TryFrom<i32> for TracedGroupCall {
    type Error = PvmError;

    fn try_from(code: i32) -> Result<TracedGroupCall, PvmError> {
        TracedGroupCall::ALL
            .into_iter()
            .find(|event| *event as i32 == code)
            .ok_or(PvmError::BadParam)
    }
}
