//! Message handlers: functions of the program that take messages when they arrive, before they can be received.

use crate::control;
use sempa_proto::message::CTX_TASK_CONTROL;
use sempa_proto::{PvmError, PvmResult};

/// A handler: gets the number of the message's buffer.
pub(crate) type HandlerFn = extern "C" fn(i32) -> i32;

/// Handlers of a program at a time, removed ones included.
pub(crate) const HANDLERS_MAX: usize = 65536;

/// Which messages a handler takes; −1 in a field means any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Filter {
    pub(crate) src: i32,
    pub(crate) tag: i32,
    pub(crate) ctx: i32,
}

impl Filter {
    fn fields(&self) -> [i32; 3] {
        [self.src, self.tag, self.ctx]
    }

    fn takes(&self, message: &Filter) -> bool {
        self.fields()
            .iter()
            .zip(message.fields())
            .all(|(wanted, is)| *wanted == -1 || *wanted == is)
    }

    /// Two filters overlap when in every field they are equal or one of them is a wildcard.
    fn overlaps(&self, other: &Filter) -> bool {
        self.fields()
            .iter()
            .zip(other.fields())
            .all(|(a, b)| *a == b || *a == -1 || b == -1)
    }
}

/// The handlers of the program, behind the library's own, which have the numbers before them.
#[derive(Default)]
pub(crate) struct Handlers {
    added: Vec<Option<(Filter, HandlerFn)>>,
}

impl Handlers {
    fn own() -> impl Iterator<Item = Filter> {
        control::TAGS.into_iter().map(|tag| Filter {
            src: -1,
            tag,
            ctx: CTX_TASK_CONTROL,
        })
    }

    /// Adds a handler and answers its number.
    ///
    /// # Errors
    /// `Exists` when another one could take the same message, `NoMem` at [`HANDLERS_MAX`].
    pub(crate) fn add(&mut self, filter: Filter, handler: HandlerFn) -> PvmResult<i32> {
        let theirs = self.added.iter().flatten().map(|(filter, _)| *filter);
        if Self::own()
            .chain(theirs)
            .any(|other| other.overlaps(&filter))
        {
            return Err(PvmError::Exists);
        }
        // The number of a removed handler is given again, as in PVM.
        let free = self.first_free().unwrap_or(self.added.len());
        if free >= HANDLERS_MAX {
            return Err(PvmError::NoMem);
        }
        self.added.resize(self.added.len().max(free + 1), None);
        self.added[free] = Some((filter, handler));
        Ok((control::TAGS.len() + free) as i32)
    }

    /// Removes a handler of the program.
    ///
    /// # Errors
    /// `BadParam` for negative numbers, `NotFound` when there is none.
    pub(crate) fn remove(&mut self, id: i32) -> PvmResult<()> {
        let id = usize::try_from(id).map_err(|_| PvmError::BadParam)?;
        let place = id
            .checked_sub(control::TAGS.len())
            .and_then(|i| self.added.get_mut(i));
        place
            .and_then(Option::take)
            .map(drop)
            .ok_or(PvmError::NotFound)
    }

    /// The handler that takes such a message.
    pub(crate) fn find(&self, message: &Filter) -> Option<HandlerFn> {
        self.added
            .iter()
            .flatten()
            .find(|(filter, _)| filter.takes(message))
            .map(|(_, handler)| *handler)
    }

    /// True when the program has no handler.
    pub(crate) fn is_empty(&self) -> bool {
        self.added.iter().all(Option::is_none)
    }

    /// Removes all handlers of the program.
    pub(crate) fn clear(&mut self) {
        self.added.clear();
    }

    /// Every handler with its number, the library's own first.
    pub(crate) fn list(&self) -> Vec<(i32, Filter)> {
        let theirs = self
            .added
            .iter()
            .map(|entry| entry.as_ref().map(|(filter, _)| *filter));
        let all = Self::own().map(Some).chain(theirs).enumerate();
        all.filter_map(|(id, filter)| filter.map(|filter| (id as i32, filter)))
            .collect()
    }

    fn first_free(&self) -> Option<usize> {
        self.added.iter().position(Option::is_none)
    }

    /// The lowest number of a removed handler.
    pub(crate) fn free_number(&self) -> Option<i32> {
        self.first_free()
            .map(|free| (control::TAGS.len() + free) as i32)
    }

    /// Numbers given so far, those of removed handlers included.
    pub(crate) fn count(&self) -> usize {
        control::TAGS.len() + self.added.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn nothing(_mid: i32) -> i32 {
        0
    }

    #[test]
    fn the_first_handler_of_a_program_is_number_nine() {
        let mut handlers = Handlers::default();
        let filter = Filter {
            src: -1,
            tag: 5,
            ctx: 0,
        };
        assert_eq!(handlers.add(filter, nothing), Ok(9));
        assert_eq!(handlers.add(Filter { tag: 6, ..filter }, nothing), Ok(10));
        assert!(
            handlers
                .find(&Filter {
                    src: 0x40001,
                    tag: 5,
                    ctx: 0
                })
                .is_some()
        );
        assert!(
            handlers
                .find(&Filter {
                    src: 0x40001,
                    tag: 7,
                    ctx: 0
                })
                .is_none()
        );
    }

    #[test]
    fn overlapping_handlers_are_refused_in_both_directions() {
        let mut handlers = Handlers::default();
        let narrow = Filter {
            src: 0x40001,
            tag: 5,
            ctx: 0,
        };
        assert_eq!(handlers.add(narrow, nothing), Ok(9));
        assert_eq!(
            handlers.add(Filter { src: -1, ..narrow }, nothing),
            Err(PvmError::Exists)
        );
        assert_eq!(handlers.add(narrow, nothing), Err(PvmError::Exists));
        assert_eq!(
            handlers.add(
                Filter {
                    src: -1,
                    tag: -1,
                    ctx: -1
                },
                nothing
            ),
            Err(PvmError::Exists)
        );
        assert_eq!(handlers.remove(9), Ok(()));
        assert_eq!(handlers.remove(9), Err(PvmError::NotFound));
        assert_eq!(handlers.remove(3), Err(PvmError::NotFound));
        assert_eq!(handlers.remove(-1), Err(PvmError::BadParam));
        assert!(handlers.is_empty());
    }
}
