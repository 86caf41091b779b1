//! Which mechanism covers which sink: a table per connection, asked once per transfer.

use core::fmt;

use crate::memory::{MAX_FRAGMENTS, PageList};
use crate::nic::{Capabilities, Mechanisms};

use super::STAGE_BYTES;

/// How a peer is let into a sink. The cheapest comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mechanism {
    /// Any ranges under one key of this transfer: IB_WR_REG_INDIR_MR, SG_GAPS, UMR.
    FragmentList,
    /// Equal pages under one key of this transfer: IB_WR_FAST_REG_MR, FRWR.
    PageList,
    /// One range under one key of this transfer: a type-2 memory window.
    Window,
    /// Whole pages under a key that the control side made, and that outlives the transfer: FMR.
    Mapping,
    /// The key of the arena, and one fragment for each range. Nothing is registered and nothing dies.
    Arena,
    /// One range of a staging buffer, under a key of whichever kind the device has; copied out afterwards.
    Staging,
}

impl Mechanism {
    /// As it is called in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FragmentList => "fragment list",
            Self::PageList => "page list",
            Self::Window => "window",
            Self::Mapping => "mapping",
            Self::Arena => "arena",
            Self::Staging => "staging",
        }
    }
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why it is that mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Why {
    /// The device takes fragment lists of that length.
    FitsFragmentList,
    /// Its pieces are whole pages, and the device takes page lists of that length.
    PageShaped,
    /// It is one range, and the device has windows.
    Contiguous,
    /// Its pieces are whole pages, and the control side can map so many.
    Mappable,
    /// The arena is exposed, and the buffer has fewer fragments than `map_on_demand`.
    BelowMapOnDemand,
    /// The arena is exposed, and nothing else covers the buffer.
    OnlyArena,
    /// No key covers the buffer.
    NoKeyCovers,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FitsFragmentList => "the device takes a fragment list of that length",
            Self::PageShaped => "whole pages, and the device takes a page list of that length",
            Self::Contiguous => "one range, and the device has windows",
            Self::Mappable => {
                "whole pages, mapped by the control side: the key stays alive until it is flushed"
            }
            Self::BelowMapOnDemand => "exposed, and fewer fragments than map_on_demand",
            Self::OnlyArena => "exposed, and nothing else covers it",
            Self::NoKeyCovers => "no key covers it: copied",
        })
    }
}

/// Why there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refused {
    /// Nothing, or more than a list says.
    #[error("no bytes, or more of them than the memory has")]
    Empty,
    /// Nothing of this device covers it, and there are no staging buffers.
    #[error("no key covers it, and there are no staging buffers: raise staging")]
    NoStaging,
    /// Nothing of this device covers a staging buffer either.
    #[error(
        "the device can put no key over so many bytes, contiguous as they may be: expose the arena"
    )]
    NoKey,
}

/// A mechanism and its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Choice {
    /// Which.
    pub mechanism: Mechanism,
    /// Why.
    pub why: Why,
}

/// What a node is set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `exposure = "arena"`: peers may be given the key of the arena, for memory that has one
    /// ([`Range::exposed`](crate::memory::Range::exposed)).
    pub expose_arena: bool,
    /// With that: a buffer of fewer fragments goes by the arena's key; from here on it is registered. 0: by the arena
    /// always; 1: only where nothing else covers it.
    pub map_on_demand: u16,
    /// Unused mappings are unmapped when so many of them stand (`fmr_flush_trigger`).
    pub flush_trigger: u32,
    /// A mapping may serve another transfer of the same memory (`fmr_cache`).
    pub cache_mappings: bool,
}

impl Settings {
    /// The arena is not exposed, and mappings are kept as by ko2iblnd's defaults.
    pub const PRIVATE: Self = Self {
        expose_arena: false,
        map_on_demand: 1,
        flush_trigger: 384,
        cache_mappings: true,
    };
}

/// What a core has, besides its device, that a sink can go by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stock {
    /// Staging buffers, and log2 of what the address of each is a multiple of.
    pub staging: Option<u8>,
    /// A pool of mappings.
    pub mappings: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self::PRIVATE
    }
}

/// What of a buffer decides: its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outline {
    /// Bytes.
    pub length: u32,
    /// Ranges, those that lie end to end counted as one.
    pub fragments: usize,
    /// Pages of the device's size, if all of it is whole pages but for the start of the first and the end of the
    /// last.
    pub pages: Option<usize>,
    /// All of it is known to the device under one key that peers may be given.
    pub exposed: bool,
}

impl Outline {
    /// One range of `length` bytes, `offset` bytes into a page of `1 << page_shift`.
    #[must_use]
    pub const fn contiguous(length: u32, offset: u32, page_shift: u8) -> Self {
        let within = match 1_u32.checked_shl(page_shift as u32) {
            Some(page) => page.wrapping_sub(1),
            None => u32::MAX,
        };
        let offset = offset & within;
        // Pages before the last byte, and that of the last byte.
        let last = length.saturating_sub(1).saturating_add(offset);
        let before = match last.checked_shr(page_shift as u32) {
            Some(before) => before,
            None => 0,
        };
        Self {
            length,
            fragments: 1,
            pages: Some((before as usize).saturating_add(1)),
            exposed: false,
        }
    }
}

/// What one connection may do, made when its terms are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices {
    /// Most pieces of a fragment list; 0 where there are none.
    fragments: usize,
    /// Most pages of a page list; 0 where there are none.
    pages: usize,
    page_shift: u8,
    window: bool,
    /// Most pages of a mapping; 0 where there are none.
    mapped_pages: u32,
    /// Most fragments of a descriptor with the arena's key; 0 where it is not exposed.
    arena: usize,
    map_on_demand: usize,
    /// The largest page that every staging buffer begins on, if there are any.
    staging: Option<u8>,
}

impl Choices {
    /// The table for a device, what its node is set to and has, and what was agreed with the peer (`max_frags`).
    #[must_use]
    pub const fn new(
        capabilities: &Capabilities,
        settings: Settings,
        max_frags: u16,
        stock: Stock,
    ) -> Self {
        let has = capabilities.mechanisms;
        let max_frags = max_frags as usize;
        Self {
            fragments: if has.contains(Mechanisms::FRAGMENTS) {
                capabilities.max_fragments as usize
            } else {
                0
            },
            pages: if has.contains(Mechanisms::PAGES) {
                capabilities.max_pages as usize
            } else {
                0
            },
            page_shift: capabilities.page_shift,
            window: has.contains(Mechanisms::WINDOW),
            mapped_pages: if has.contains(Mechanisms::MAPPINGS) && stock.mappings {
                capabilities.max_pages
            } else {
                0
            },
            arena: match settings.expose_arena {
                true if max_frags < MAX_FRAGMENTS => max_frags,
                true => MAX_FRAGMENTS,
                false => 0,
            },
            map_on_demand: settings.map_on_demand as usize,
            staging: stock.staging,
        }
    }

    /// What becomes of a sink of this shape, and why.
    ///
    /// # Errors
    /// Why nothing can. With staging buffers no shape is refused, only a length that the device cannot put a key
    /// over even where it is contiguous.
    pub const fn choose(&self, outline: &Outline) -> Result<Choice, Refused> {
        if outline.length == 0 || outline.fragments == 0 {
            return Err(Refused::Empty);
        }
        let may_expose = outline.exposed && outline.fragments <= self.arena;
        if may_expose && (self.map_on_demand == 0 || outline.fragments < self.map_on_demand) {
            return Ok(Choice {
                mechanism: Mechanism::Arena,
                why: Why::BelowMapOnDemand,
            });
        }
        if let Some(choice) = self.register(outline) {
            return Ok(choice);
        }
        if may_expose {
            return Ok(Choice {
                mechanism: Mechanism::Arena,
                why: Why::OnlyArena,
            });
        }
        if self.staging.is_none() || outline.length > STAGE_BYTES {
            return Err(Refused::NoStaging);
        }
        match self.over_stage(outline.length) {
            Some(_) => Ok(Choice {
                mechanism: Mechanism::Staging,
                why: Why::NoKeyCovers,
            }),
            None => Err(Refused::NoKey),
        }
    }

    /// What puts a key over the first `length` bytes of a staging buffer, which begins on a page. Where page lists are
    /// too short for so many, larger pages do.
    #[must_use]
    pub const fn over_stage(&self, length: u32) -> Option<Mechanism> {
        let outline = Outline::contiguous(length, 0, self.page_shift);
        match self.register(&outline) {
            Some(choice) => Some(choice.mechanism),
            None if self.stage_shift(length).is_some() => Some(Mechanism::PageList),
            None if self.arena != 0 => Some(Mechanism::Arena),
            None => None,
        }
    }

    /// log2 of the page size for a page list over the first `length` bytes of a staging buffer: the device's own if that
    /// will do, else the least that makes the list short enough. `None` where none does.
    #[must_use]
    pub const fn stage_shift(&self, length: u32) -> Option<u8> {
        let largest = match self.staging {
            Some(largest) if largest > self.page_shift => largest,
            _ => self.page_shift,
        };
        let mut shift = self.page_shift;
        while shift <= largest {
            let outline = Outline::contiguous(length, 0, shift);
            if let Some(pages) = outline.pages
                && pages <= self.pages
            {
                return Some(shift);
            }
            shift = shift.saturating_add(1);
        }
        None
    }

    /// A key for these bytes alone, in the order of what it costs.
    const fn register(&self, outline: &Outline) -> Option<Choice> {
        if outline.fragments <= self.fragments {
            return Some(Choice {
                mechanism: Mechanism::FragmentList,
                why: Why::FitsFragmentList,
            });
        }
        if let Some(pages) = outline.pages
            && pages <= self.pages
        {
            return Some(Choice {
                mechanism: Mechanism::PageList,
                why: Why::PageShaped,
            });
        }
        if self.window && outline.fragments == 1 {
            return Some(Choice {
                mechanism: Mechanism::Window,
                why: Why::Contiguous,
            });
        }
        if let Some(pages) = outline.pages
            && pages <= self.mapped_pages as usize
        {
            return Some(Choice {
                mechanism: Mechanism::Mapping,
                why: Why::Mappable,
            });
        }
        None
    }

    /// Longest list of pages that anything here takes.
    const fn most_pages(&self) -> usize {
        let mapped = self.mapped_pages as usize;
        if self.pages > mapped {
            self.pages
        } else {
            mapped
        }
    }

    /// Bytes of a staging buffer that its mapping lies over: all of them, if so many can be mapped.
    #[must_use]
    pub const fn mapped_stage(&self) -> u32 {
        let page = match 1_u32.checked_shl(self.page_shift as u32) {
            Some(page) => page,
            None => u32::MAX,
        };
        match self.mapped_pages.checked_mul(page) {
            Some(most) if most < STAGE_BYTES => most,
            _ => STAGE_BYTES,
        }
    }

    /// What becomes of `length` bytes of `list` from `offset` on.
    ///
    /// # Errors
    /// As [`choose`](Self::choose).
    pub fn choose_for(
        &self,
        list: &PageList<'_>,
        offset: u64,
        length: u32,
    ) -> Result<Choice, Refused> {
        if offset.saturating_add(u64::from(length)) > list.length() || length == 0 {
            return Err(Refused::Empty);
        }
        let exposed = self.arena != 0 && list.exposed().is_some();
        // A part of a list has no more pieces than all of it.
        if list.pieces().len() <= self.fragments && (!exposed || self.map_on_demand == 1) {
            return Ok(Choice {
                mechanism: Mechanism::FragmentList,
                why: Why::FitsFragmentList,
            });
        }
        let shape = list.shape(offset, length);
        self.choose(&Outline {
            length,
            fragments: shape.fragments(),
            pages: match self.most_pages() {
                0 => None,
                _ => shape.pages(self.page_shift, length),
            },
            exposed,
        })
    }

    /// Whether a sink so covered takes a window.
    #[must_use]
    pub const fn takes_window(&self, mechanism: Mechanism, length: u32) -> bool {
        match mechanism {
            Mechanism::FragmentList | Mechanism::PageList | Mechanism::Window => true,
            Mechanism::Mapping | Mechanism::Arena => false,
            Mechanism::Staging => !matches!(
                self.over_stage(length),
                Some(Mechanism::Mapping | Mechanism::Arena)
            ),
        }
    }

    /// Whether a sink so covered takes a mapping of the pool.
    #[must_use]
    pub const fn takes_mapping(&self, mechanism: Mechanism, length: u32) -> bool {
        match mechanism {
            Mechanism::Mapping => true,
            Mechanism::Staging => matches!(self.over_stage(length), Some(Mechanism::Mapping)),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Choice, Choices, Mechanism, Outline, Refused, Settings, Stock, Why};
    use crate::nic::{Capabilities, Mechanisms};
    use crate::registration::scratch::tests::capabilities;

    const LENGTH: u32 = 100_000;

    fn shape(fragments: usize, pages: Option<usize>, exposed: bool) -> Outline {
        Outline {
            length: LENGTH,
            fragments,
            pages,
            exposed,
        }
    }

    fn exposing(map_on_demand: u16) -> Settings {
        Settings {
            expose_arena: true,
            map_on_demand,
            ..Settings::PRIVATE
        }
    }

    const fn stock(staging: bool) -> Stock {
        Stock {
            staging: if staging { Some(12) } else { None },
            mappings: true,
        }
    }

    fn choose(
        mechanisms: Mechanisms,
        settings: Settings,
        max_frags: u16,
        staging: bool,
        outline: Outline,
    ) -> Result<(Mechanism, Why), Refused> {
        let capabilities = Capabilities {
            max_pages: 64,
            ..capabilities(mechanisms)
        };
        Choices::new(&capabilities, settings, max_frags, stock(staging))
            .choose(&outline)
            .map(|Choice { mechanism, why }| (mechanism, why))
    }

    #[test]
    fn the_cheapest_that_covers_the_shape_wins() {
        let all = Mechanisms::FRAGMENTS | Mechanisms::PAGES | Mechanisms::WINDOW;
        let private = Settings::PRIVATE;
        let of = |mechanisms, outline| choose(mechanisms, private, 257, true, outline);
        for (mechanisms, outline, expected) in [
            (
                all,
                shape(4, None, false),
                (Mechanism::FragmentList, Why::FitsFragmentList),
            ),
            (
                all,
                shape(5, Some(64), false),
                (Mechanism::PageList, Why::PageShaped),
            ),
            (
                all,
                shape(5, Some(65), false),
                (Mechanism::Staging, Why::NoKeyCovers),
            ),
            (
                all,
                shape(5, None, false),
                (Mechanism::Staging, Why::NoKeyCovers),
            ),
            (
                Mechanisms::WINDOW,
                shape(1, Some(25), false),
                (Mechanism::Window, Why::Contiguous),
            ),
            (
                Mechanisms::WINDOW,
                shape(2, Some(25), false),
                (Mechanism::Staging, Why::NoKeyCovers),
            ),
            (
                Mechanisms::PAGES,
                shape(2, None, false),
                (Mechanism::Staging, Why::NoKeyCovers),
            ),
        ] {
            assert_eq!(
                of(mechanisms, outline),
                Ok(expected),
                "{mechanisms:?} {outline:?}"
            );
        }
    }

    #[test]
    fn map_on_demand_is_the_number_of_fragments_from_which_on_memory_is_registered() {
        let all = Mechanisms::FRAGMENTS;
        for (map_on_demand, fragments, arena) in [
            (0, 1, true),
            (0, 4, true),
            (1, 1, false),
            (2, 1, true),
            (2, 2, false),
            (4, 3, true),
            (4, 4, false),
        ] {
            let of = |exposed| {
                choose(
                    all,
                    exposing(map_on_demand),
                    257,
                    true,
                    shape(fragments, None, exposed),
                )
            };
            let expected = if arena {
                Mechanism::Arena
            } else {
                Mechanism::FragmentList
            };
            assert_eq!(
                of(true).map(|choice| choice.0),
                Ok(expected),
                "{map_on_demand} {fragments}"
            );
            assert_eq!(
                of(false).map(|choice| choice.0),
                Ok(Mechanism::FragmentList)
            );
        }
    }

    #[test]
    fn the_arena_is_the_last_key_and_no_longer_than_the_peer_takes() {
        let of = |max_frags, fragments, staging| {
            choose(
                Mechanisms::WINDOW,
                exposing(1),
                max_frags,
                staging,
                shape(fragments, None, true),
            )
        };
        assert_eq!(of(257, 1, true), Ok((Mechanism::Window, Why::Contiguous)));
        assert_eq!(of(16, 16, true), Ok((Mechanism::Arena, Why::OnlyArena)));
        assert_eq!(of(16, 17, true), Ok((Mechanism::Staging, Why::NoKeyCovers)));
        assert_eq!(of(16, 17, false), Err(Refused::NoStaging));
        assert_eq!(
            of(300, 258, false),
            Err(Refused::NoStaging),
            "what a message holds"
        );
        let none = Mechanisms::empty();
        let bare = |settings, exposed, fragments| {
            choose(none, settings, 16, true, shape(fragments, None, exposed))
        };
        assert_eq!(
            bare(exposing(1), true, 2),
            Ok((Mechanism::Arena, Why::OnlyArena))
        );
        assert_eq!(
            bare(exposing(1), true, 17),
            Ok((Mechanism::Staging, Why::NoKeyCovers))
        );
        assert_eq!(bare(Settings::PRIVATE, true, 1), Err(Refused::NoKey));
    }

    #[test]
    fn a_staging_buffer_takes_a_window_where_there_are_any() {
        for (mechanisms, settings, expected) in [
            (
                Mechanisms::WINDOW,
                Settings::PRIVATE,
                Some(Mechanism::Window),
            ),
            (Mechanisms::PAGES, exposing(1), Some(Mechanism::PageList)),
            (
                Mechanisms::FRAGMENTS,
                exposing(1),
                Some(Mechanism::FragmentList),
            ),
            (Mechanisms::empty(), exposing(1), Some(Mechanism::Arena)),
            (Mechanisms::empty(), Settings::PRIVATE, None),
        ] {
            let choices = Choices::new(&capabilities(mechanisms), settings, 257, stock(true));
            assert_eq!(choices.over_stage(0x8000), expected);
            let takes = expected.is_some_and(|by| by != Mechanism::Arena);
            assert_eq!(
                choices.takes_window(Mechanism::Staging, 0x8000),
                takes || expected.is_none()
            );
        }
        // Nine pages, of which the device takes eight. On a boundary of two, five larger ones do.
        let larger = Choices::new(
            &capabilities(Mechanisms::PAGES),
            Settings::PRIVATE,
            257,
            Stock {
                staging: Some(20),
                mappings: false,
            },
        );
        assert_eq!(larger.stage_shift(0x8000), Some(12));
        assert_eq!(larger.stage_shift(0x8001), Some(13));
        assert_eq!(larger.stage_shift(1 << 20), Some(17));
        assert_eq!(larger.over_stage(0x8001), Some(Mechanism::PageList));
        assert!(larger.takes_window(Mechanism::Staging, 0x8001));
        let choices = Choices::new(
            &capabilities(Mechanisms::PAGES),
            Settings::PRIVATE,
            257,
            stock(true),
        );
        assert_eq!(choices.over_stage(0x8001), None);
        assert_eq!(choices.choose(&shape(3, None, false)), Err(Refused::NoKey));
    }

    #[test]
    fn a_range_spans_the_pages_it_touches() {
        assert_eq!(Outline::contiguous(4096, 0, 12).pages, Some(1));
        assert_eq!(Outline::contiguous(4096, 1, 12).pages, Some(2));
        assert_eq!(Outline::contiguous(1 << 20, 4095, 12).pages, Some(257));
    }
}
