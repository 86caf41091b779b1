//! A page list whose ranges several cores export for a while.

use core::ptr;

use super::{PageList, Sharing};

/// A page list that is put by while other lists have its ranges, one for each core that exports them. As long as one of
/// them is out nobody has a reference to the bytes: devices and pollers copy in and out of them, as with
/// [`SharedRange`](super::SharedRange). When all are back the list is its owner's again.
///
/// One that is dropped never comes back, and the list stays put by.
#[derive(Debug)]
pub struct Shares<'a> {
    whole: &'a mut PageList<'a>,
    out: u32,
}

impl<'a> Shares<'a> {
    /// Puts a list by.
    #[must_use]
    pub const fn new(whole: &'a mut PageList<'a>) -> Self {
        Self { whole, out: 0 }
    }

    /// Makes an empty list one of the same ranges; whether it was empty, and no share of another.
    pub fn share(&mut self, list: &mut PageList<'a>) -> bool {
        if !list.pieces.is_empty() || list.sharing != Sharing::None {
            return false;
        }
        let Some(out) = self.out.checked_add(1) else {
            return false;
        };
        for piece in &self.whole.pieces {
            // It has room for as many as any.
            if list.pieces.push(*piece).is_err() {
                break;
            }
        }
        list.length = self.whole.length;
        list.shape = self.whole.shape;
        list.reshaped = self.whole.reshaped;
        list.exposed = self.whole.exposed;
        list.sharing = Sharing::Of(self.name());
        list.generation = list.generation.wrapping_add(1);
        self.out = out;
        true
    }

    /// Whether this is one of those lists.
    #[must_use]
    pub fn has(&self, list: &PageList<'a>) -> bool {
        list.sharing == Sharing::Of(self.name())
    }

    /// Takes one of those lists back and leaves it empty; whether it was one.
    pub fn take_back(&mut self, list: &mut PageList<'a>) -> bool {
        if !self.has(list) {
            return false;
        }
        let Some(out) = self.out.checked_sub(1) else {
            return false;
        };
        list.pieces.clear();
        let generation = list.generation.wrapping_add(1);
        *list = PageList {
            generation,
            ..PageList::new()
        };
        self.out = out;
        true
    }

    /// The list as it was put by.
    ///
    /// # Errors
    /// All of this, while another list has its ranges.
    pub const fn whole(self) -> Result<&'a mut PageList<'a>, Self> {
        if self.out != 0 {
            return Err(self);
        }
        Ok(self.whole)
    }

    /// The list is borrowed for as long as it is, so no other one is ever at its place while a share is about.
    fn name(&self) -> usize {
        ptr::from_ref::<PageList<'a>>(self.whole).addr()
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::boxed::Box;

    use super::{PageList, Shares};
    use crate::memory::Range;
    use crate::nic::LKey;

    fn list(bytes: usize) -> &'static mut PageList<'static> {
        let memory = Box::leak(std::vec![0_u8; bytes].into_boxed_slice());
        let mut list = PageList::new();
        list.push(Range::of_bytes(memory, LKey(1)).unwrap())
            .unwrap();
        Box::leak(Box::new(list))
    }

    #[test]
    fn a_list_is_its_owners_again_when_all_its_shares_are_back() {
        let mut shares = Shares::new(list(8));
        let (mut one, mut other) = (PageList::new(), PageList::new());
        assert!(shares.share(&mut one) && shares.share(&mut other));
        assert_eq!(one.write_at(2, &[7, 8]), 2);
        let mut found = [0; 4];
        assert_eq!(other.read_at(1, &mut found), 4);
        assert_eq!(found, [0, 7, 8, 0]);
        for list in [&mut one, &mut other] {
            assert_eq!((list.length(), list.pieces().len()), (8, 1));
            assert!(list.pop().is_none());
            assert_eq!(list.chunks().count() + list.chunks_mut().count(), 0);
        }
        let mut shares = shares.whole().unwrap_err();
        assert!(shares.take_back(&mut one));
        assert!(!shares.take_back(&mut one), "once is enough");
        let mut shares = shares.whole().unwrap_err();
        assert!(shares.take_back(&mut other));
        assert_eq!((other.length(), other.pieces().len()), (0, 0));
        let whole = shares.whole().unwrap();
        assert_eq!(whole.chunks().next().unwrap(), [0, 0, 7, 8, 0, 0, 0, 0]);
        assert_eq!(whole.pop().unwrap().sge().length, 8);
    }

    #[test]
    fn a_share_takes_no_range_and_no_other_share() {
        let empty = Box::leak(Box::new(PageList::new()));
        let mut shares = Shares::new(empty);
        let mut others = Shares::new(list(8));
        let mut share = PageList::new();
        assert!(shares.share(&mut share));
        assert!(!others.share(&mut share), "of an empty list, yet a share");
        let range = list(8).pop().unwrap();
        let range = share.push(range).unwrap_err();
        assert!(share.push_shared(range.share()).is_err());
        assert!(shares.take_back(&mut share));
        assert!(shares.whole().is_ok() && others.whole().is_ok());
    }

    #[test]
    fn only_a_share_of_this_list_is_taken_back() {
        let (mut shares, mut others) = (Shares::new(list(8)), Shares::new(list(8)));
        let mut share = PageList::new();
        assert!(others.share(&mut share));
        assert!(!shares.take_back(&mut share));
        assert!(!shares.take_back(list(8)));
        assert!(!shares.share(list(8)), "it has ranges of its own");
        assert_eq!(share.length(), 8);
        assert!(!shares.share(&mut share), "it is another list's");
        assert!(shares.whole().is_ok());
        assert!(others.take_back(&mut share));
    }
}
