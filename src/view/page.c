// Wraps an SVG picture into an HTML page. Its script zooms and pans by moving the view
// box, so it works on any picture.
#include "view/page.h"

static const char kPageHead[] =
    "<!doctype html>\n<html><head><meta charset=\"utf-8\"><title>schedule</title>\n"
    "<style>html,body{margin:0;height:100%;overflow:hidden}svg{width:100%;height:100%;"
    "cursor:grab}#tip{position:fixed;display:none;background:#222;color:#fff;"
    "font:12px sans-serif;padding:4px 8px;border-radius:4px;pointer-events:none}"
    "</style></head><body>\n<div id=\"tip\"></div>\n";

// Zoom and pan move the view box; the description is a task's <title>.
static const char kPageTail[] =
    "<script>\n"
    "const svg=document.querySelector('svg'),tip=document.getElementById('tip');\n"
    "const full=svg.viewBox.baseVal;let x=0,y=0,w=full.width,h=full.height,drag=null;\n"
    "const W=w,H=h;svg.removeAttribute('width');svg.removeAttribute('height');\n"
    "svg.setAttribute('preserveAspectRatio','xMinYMin meet');\n"
    "const titles=new Map();for(const t of svg.querySelectorAll('title')){"
    "titles.set(t.parentNode,t.textContent);}\n"
    "for(const t of [...svg.querySelectorAll('title')])t.remove();\n"
    "const show=()=>svg.setAttribute('viewBox',`${x} ${y} ${w} ${h}`);\n"
    "const unit=()=>1/svg.getScreenCTM().a;\n"
    "svg.addEventListener('wheel',e=>{e.preventDefault();"
    "const k=Math.exp(e.deltaY/500),u=unit(),b=svg.getBoundingClientRect();"
    "const px=x+(e.clientX-b.left)*u,py=y+(e.clientY-b.top)*u;"
    "if(w*k>4*W||w*k<W/500)return;x=px-(px-x)*k;y=py-(py-y)*k;w*=k;h*=k;show();},"
    "{passive:false});\n"
    "svg.addEventListener('pointerdown',e=>drag=[e.clientX,e.clientY]);\n"
    "addEventListener('pointerup',()=>drag=null);\n"
    "svg.addEventListener('dblclick',()=>{x=y=0;w=W;h=H;show();});\n"
    "svg.addEventListener('pointermove',e=>{if(drag){const u=unit();"
    "x-=(e.clientX-drag[0])*u;y-=(e.clientY-drag[1])*u;drag=[e.clientX,e.clientY];show();"
    "}"
    "const t=titles.get(e.target);tip.style.display=t?'block':'none';if(t){"
    "tip.textContent=t;tip.style.left=Math.min(e.clientX+12,innerWidth-tip.offsetWidth-4)"
    "+'px';tip.style.top=e.clientY+14+'px';}});\n"
    "</script></body></html>\n";

void jpp__svg_begin(double width, double height, jpp_str_t* str) {
  jpp_str_appendf(str,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" "
                  "height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" font-family=\"sans-serif\" "
                  "font-size=\"11\" fill=\"#222\">\n"
                  "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
                  width, height, width, height);
}

void jpp__page_begin(jpp_str_t* str) { jpp_str_append(str, kPageHead); }

void jpp__page_end(jpp_str_t* str) { jpp_str_append(str, kPageTail); }
