//! Requests to the group service, and their replies. The master's daemon provides the service for
//! the whole virtual machine.

use crate::error::PvmError;
use crate::ids::Tid;
use serde::{Deserialize, Serialize};

/// Value of the count of a barrier or a freeze that stands for all current members.
pub const ALL_MEMBERS: i32 = -1;

/// Value in place of a tid for which [`GroupRequest::Instance`] returns the lowest free instance
/// number, as PVM does for −1.
pub const NO_MEMBER: Tid = Tid::from_raw(-1);

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
    /// Wait until `required_members` members have called the barrier; then all these members
    /// receive the reply. → [`GroupReply::Number`]
    Barrier {
        group: Vec<u8>,
        /// Number of members that must call the barrier; [`ALL_MEMBERS`] means the current number
        /// of members.
        required_members: i32,
    },
    /// Wait until `required_members` members have requested the freeze; afterwards the group
    /// accepts no new members. → [`GroupReply::Number`]
    Freeze {
        group: Vec<u8>,
        /// Number of members that must request the freeze; [`ALL_MEMBERS`] means the current number
        /// of members.
        required_members: i32,
    },
    /// Look up the instance number of a task, or for [`NO_MEMBER`] the lowest free instance number.
    /// → [`GroupReply::Number`]
    Instance { group: Vec<u8>, tid: Tid },
    /// Look up the task with an instance number. → [`GroupReply::Number`]
    Member { group: Vec<u8>, instance: i32 },
    /// Count the members. → [`GroupReply::Number`]
    Size { group: Vec<u8> },
    /// List the members by instance number. → [`GroupReply::Members`]
    Members { group: Vec<u8> },
    /// List all groups with members and state. → [`GroupReply::Groups`]
    List,
}

/// The reply to a [`GroupRequest`]. The request states which variant is its reply on success.
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
    /// Number of members that must call the barrier or the freeze.
    pub required_members: u32,
    /// Members that have called the barrier or the freeze and wait for the others.
    pub waiting_members: Vec<Tid>,
}

/// State of one group, as the group service reports it.
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
    pub fn member_count(&self) -> usize {
        self.members.iter().filter(|tid| **tid != Tid::NONE).count()
    }
}

/// Numbers by which the group library selects a request when it calls the C function
/// `sempa_group_request` of the task's library.
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
    pub const ALL: [Self; 9] = [
        Self::Join,
        Self::Leave,
        Self::Barrier,
        Self::Freeze,
        Self::Instance,
        Self::Member,
        Self::Size,
        Self::Members,
        Self::List,
    ];

    /// Converts the call into a request. `argument` is the integer argument of the call; calls
    /// without an integer argument ignore it.
    pub fn to_request(self, group: Vec<u8>, argument: i32) -> GroupRequest {
        match self {
            Self::Join => GroupRequest::Join { group },
            Self::Leave => GroupRequest::Leave { group },
            Self::Barrier => GroupRequest::Barrier {
                group,
                required_members: argument,
            },
            Self::Freeze => GroupRequest::Freeze {
                group,
                required_members: argument,
            },
            Self::Instance => GroupRequest::Instance {
                group,
                tid: Tid::from_raw(argument),
            },
            Self::Member => GroupRequest::Member {
                group,
                instance: argument,
            },
            Self::Size => GroupRequest::Size { group },
            Self::Members => GroupRequest::Members { group },
            Self::List => GroupRequest::List,
        }
    }
}

impl TryFrom<i32> for GroupCall {
    type Error = PvmError;

    fn try_from(code: i32) -> Result<Self, PvmError> {
        Self::ALL
            .into_iter()
            .find(|call| *call as i32 == code)
            .ok_or(PvmError::BadParam)
    }
}

/// Encodes all groups as integers for a C caller. The integers have the same order as in PVM's own
/// group list.
///
/// The list begins with the number of groups. Per group: length of the name, bytes of the name as
/// one integer each, number of members, length of the member list, barrier count (−1 without a
/// barrier), number of waiting members; then the member list (−1 for a free instance) and the
/// waiting members.
pub fn encode_group_list(groups: &[GroupInfo]) -> Vec<i32> {
    let mut encoded_list = vec![groups.len() as i32];
    for group in groups {
        encoded_list.push(group.name.len() as i32);
        encoded_list.extend(group.name.iter().map(|byte| i32::from(*byte)));
        let waiting_members: &[Tid] = group.barrier.as_ref().map_or(&[], |b| &b.waiting_members);
        let required_members = group
            .barrier
            .as_ref()
            .map_or(-1, |b| b.required_members as i32);
        encoded_list.extend([
            group.member_count() as i32,
            group.members.len() as i32,
            required_members,
            waiting_members.len() as i32,
        ]);
        encoded_list.extend(
            group
                .members
                .iter()
                .map(|tid| if *tid == Tid::NONE { -1 } else { tid.raw() }),
        );
        encoded_list.extend(waiting_members.iter().map(|tid| tid.raw()));
    }
    encoded_list
}

/// Calls of the group library that can be traced. The trace record contains the argument that is
/// named at the variant, and the result, as in PVM.
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
    pub const ALL: [Self; 10] = [
        Self::Join,
        Self::Leave,
        Self::Barrier,
        Self::Bcast,
        Self::Instance,
        Self::Member,
        Self::Size,
        Self::Gather,
        Self::Scatter,
        Self::Reduce,
    ];

    /// Returns the name of the event, the name of the trace item for the argument (`None` if the
    /// call has no argument), and the name of the trace item for the result.
    pub fn trace_names(self) -> (&'static str, Option<&'static str>, &'static str) {
        match self {
            Self::Join => ("joingroup", None, "CC"),
            Self::Leave => ("lvgroup", None, "CC"),
            Self::Barrier => ("barrier", Some("GBC"), "CC"),
            Self::Bcast => ("bcast", Some("MC"), "CC"),
            Self::Instance => ("getinst", Some("GT"), "GI"),
            Self::Member => ("gettid", Some("GI"), "GT"),
            Self::Size => ("gsize", None, "GS"),
            Self::Gather => ("gather", Some("MC"), "CC"),
            Self::Scatter => ("scatter", Some("MC"), "CC"),
            Self::Reduce => ("reduce", Some("MC"), "CC"),
        }
    }
}

impl TryFrom<i32> for TracedGroupCall {
    type Error = PvmError;

    fn try_from(code: i32) -> Result<Self, PvmError> {
        Self::ALL
            .into_iter()
            .find(|event| *event as i32 == code)
            .ok_or(PvmError::BadParam)
    }
}
